// A pair of token files as literal bytes: 3 sequences of uint16 in 2 documents. Written by hand, not by the writer.
#pragma once

#include <string>

namespace fsdp::testing {

using namespace std::string_literals;

// Tokens 1 2 3 | 500 | 65535 7; document 0 is the first two sequences, document 1 the last one.
inline const std::string kGoldenBin = "\x01\x00\x02\x00\x03\x00\xf4\x01\xff\xff\x07\x00"s;
inline const std::string kGoldenIdx =
    "MMIDIDX\x00\x00"                                   // magic, 9 bytes
    "\x01\x00\x00\x00\x00\x00\x00\x00"                  // at 9: version
    "\x08"                                              // at 17: uint16
    "\x03\x00\x00\x00\x00\x00\x00\x00"                  // at 18: sequences
    "\x03\x00\x00\x00\x00\x00\x00\x00"                  // at 26: entries of the document index
    "\x03\x00\x00\x00\x01\x00\x00\x00\x02\x00\x00\x00"  // at 34: sizes
    "\x00\x00\x00\x00\x00\x00\x00\x00\x06\x00\x00\x00\x00\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00"    // at 46
    "\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x00\x00\x00\x00"s;  // at 70

}  // namespace fsdp::testing
