#!/usr/bin/env python3
"""Tokenises text into a pair of token files, PREFIX.bin and PREFIX.idx, that `fsdp train` reads (docs/data.md).

Usage: tokenize_text.py --tokenizer tokenizer.json|NAME.model --input FILE... --output PREFIX
           [--format text|jsonl] [--key text] [--document file|line|paragraph] [--append-eod TOKEN_OR_ID] [--overwrite]

A .model is read with the wheel sentencepiece, any other tokenizer with the wheel tokenizers; both are in
scripts/requirements-tokenize.txt. Only ids of the text itself are written: no begin or end token that the tokenizer would
add, and no truncation or padding that it was saved with; --append-eod puts one token at the end of each document.
Documents without a token are left out. Memory: a batch of documents, and 4 bytes a document.
Exit code: 0 all good, 1 the disk failed, 2 the command line, the tokenizer or the input is wrong, 130 after Ctrl-C.
"""

import argparse
import array
import contextlib
import fcntl
import json
import os
import pathlib
import signal
import struct
import sys

REQUIREMENTS = "scripts/requirements-tokenize.txt"
BATCH_DOCUMENTS = 1000
BATCH_CHARACTERS = 4_000_000
LONGEST_SEQUENCE = 2**31 - 1  # tokens; a longer document is several sequences
DTYPES = (  # smallest first: vocabulary it holds, code in the .idx, type code of array, name
    (2**8, 1, "B", "uint8"),
    (2**16, 8, "H", "uint16"),
    (2**31, 4, "i", "int32"),
)


class UserError(Exception):
    pass


def import_wheel(name):
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"the wheel {name} is missing ({error}); install it with: "
                        f"{sys.executable} -m pip install --no-deps -r {REQUIREMENTS}") from error


class JsonTokenizer:
    """A tokenizer.json, by the wheel tokenizers."""

    def __init__(self, path):
        tokenizers = import_wheel("tokenizers")
        try:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the wheel raises nothing more exact
            raise UserError(f"{path} is no tokenizer.json: {error}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.vocabulary = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, texts):
        return [encoding.ids for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def find(self, token):
        return self.tokenizer.token_to_id(token)


class ModelTokenizer:
    """A .model, by the wheel sentencepiece."""

    def __init__(self, path):
        sentencepiece = import_wheel("sentencepiece")
        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except Exception as error:
            raise UserError(f"{path} is no sentencepiece model: {error}") from error
        self.vocabulary = self.processor.get_piece_size()

    def encode(self, texts):
        return self.processor.encode(texts, out_type=int, add_bos=False, add_eos=False)

    def find(self, token):
        found = self.processor.piece_to_id(token)  # the unknown token's for pieces that are not there
        return found if self.processor.id_to_piece(found) == token else None


def open_tokenizer(path):
    check_file(path)
    tokenizer = ModelTokenizer(path) if path.suffix == ".model" else JsonTokenizer(path)
    if tokenizer.vocabulary < 1:
        raise UserError(f"{path}: the tokenizer has no tokens")
    if tokenizer.vocabulary > DTYPES[-1][0]:
        raise UserError(f"{path}: token ids up to {tokenizer.vocabulary - 1}, expected {DTYPES[-1][0] - 1} at most")
    return tokenizer


def find_eod(tokenizer, text):
    """The id that --append-eod names: digits are an id, anything else a token."""
    if text.isascii() and text.isdigit():
        if int(text) >= tokenizer.vocabulary:
            raise UserError(f"--append-eod: id {text} is beyond the vocabulary of {tokenizer.vocabulary}")
        return int(text)
    found = tokenizer.find(text)
    if found is None:
        raise UserError(f"--append-eod: the tokenizer has no token \"{text}\"; expected one of its tokens, or an id below "
                        f"{tokenizer.vocabulary}")
    return found


def check_file(path):
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.is_dir():
        raise UserError(f"{path} is a folder, expected a file")


def open_input(name):
    """-> (how it is called in messages, the file)"""
    if name == "-":
        return "standard input", contextlib.nullcontext(sys.stdin.buffer)
    return name, open(name, "rb")


def decode(data, where):
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: this is no UTF-8: {error.reason} at byte {error.start}") from error


def read_lines(name, file):
    """-> (file:line, text without its newline)"""
    for number, line in enumerate(file, 1):
        where = f"{name}:{number}"
        yield where, decode(line.removesuffix(b"\n"), where)


def read_paragraphs(name, file):
    lines = []
    for _, line in read_lines(name, file):
        if line.strip(" \t\r\f\v"):
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []
    if lines:
        yield "\n".join(lines)


def read_json_texts(name, file, key):
    for where, line in read_lines(name, file):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: this is no JSON: {error}") from error
        if not isinstance(value, dict):
            raise UserError(f"{where}: expected an object with the key \"{key}\", got {type(value).__name__}")
        if key not in value:
            raise UserError(f"{where}: expected the key \"{key}\", got only {', '.join(value) or 'an empty object'}")
        if not isinstance(value[key], str):
            raise UserError(f"{where}: expected a string under \"{key}\", got {type(value[key]).__name__}")
        try:
            value[key].encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(f"{where}: half of a surrogate pair in the string under \"{key}\"") from error
        yield value[key]


def read_documents(options):
    for given in options.input:
        name, opened = open_input(given)
        with opened as file:
            if options.format == "jsonl":
                yield from read_json_texts(name, file, options.key)
            elif options.document == "line":
                yield from (text for _, text in read_lines(name, file))
            elif options.document == "paragraph":
                yield from read_paragraphs(name, file)
            else:
                yield decode(file.read(), name)


def batches(documents):
    batch, characters = [], 0
    for text in documents:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def little_endian(values):
    if sys.byteorder == "big":
        values.byteswap()
    return values


@contextlib.contextmanager
def interrupts_held():
    """Ctrl-C waits until the end of the block, so that no file exists of which nobody knows."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class PairWriter:
    """Writes PREFIX.bin.part and PREFIX.idx.part; finish() gives them their names, the .idx last. Used with `with`."""

    def __init__(self, prefix, vocabulary, overwrite):
        if prefix.endswith("/"):
            raise UserError(f"--output: \"{prefix}\" names no file: expected a path such as folder/name")
        prefix = pathlib.Path(prefix)
        if prefix.suffix in (".bin", ".idx"):
            prefix = prefix.with_suffix("")
        if not prefix.name:
            raise UserError("--output: expected a prefix for the two files")
        self.bin, self.idx = (prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx"))
        for path in (self.bin, self.idx):
            if path.exists() and not path.is_file():
                raise UserError(f"{path} exists and is not a regular file")
            if path.exists() and not overwrite:
                raise UserError(f"{path} exists: choose another name, or give --overwrite")
        self.code, self.type_code, self.dtype = next(dtype[1:] for dtype in DTYPES if vocabulary <= dtype[0])
        self.sizes = array.array("i")  # tokens of each sequence
        self.continued = set()         # sequences that do not begin a document
        self.tokens = self.documents = 0
        self.parts = []
        try:
            prefix.parent.mkdir(parents=True, exist_ok=True)
            self.file = self.open_part(self.bin)
        except OSError as error:
            raise UserError(f"{self.bin}.part cannot be written: {error.strerror}") from error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self.file.close()
        for part in self.parts:
            part.unlink(missing_ok=True)

    def open_part(self, path):
        part = pathlib.Path(f"{path}.part")
        with interrupts_held():
            file = open(part, "ab")  # not emptied before it is ours
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(f"{part} is being written by another process") from error
            self.parts.append(part)
        file.truncate(0)
        return file

    def add(self, ids):
        """One document."""
        little_endian(array.array(self.type_code, ids)).tofile(self.file)
        for first in range(0, len(ids), LONGEST_SEQUENCE):
            if first > 0:
                self.continued.add(len(self.sizes))
            self.sizes.append(min(LONGEST_SEQUENCE, len(ids) - first))
        self.tokens += len(ids)
        self.documents += 1

    def finish(self):
        width = array.array(self.type_code).itemsize
        pointers, offset = array.array("q"), 0
        for size in self.sizes:
            pointers.append(offset)
            offset += size * width
        starts = array.array("q", (i for i in range(len(self.sizes)) if i not in self.continued))
        starts.append(len(self.sizes))
        with self.open_part(self.idx) as index:
            index.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, self.code, len(self.sizes), len(starts)))
            for table in (self.sizes, pointers, starts):
                little_endian(table).tofile(index)
            self.close_part(index)
        self.close_part(self.file)
        self.idx.unlink(missing_ok=True)  # an old .idx must never stand beside the new .bin
        os.replace(self.parts[0], self.bin)
        try:
            os.replace(self.parts[1], self.idx)
        except OSError:
            self.bin.unlink()
            raise
        self.parts = []

    @staticmethod
    def close_part(file):
        file.flush()
        os.fsync(file.fileno())
        file.close()


def tokenize(options):
    """-> what was written, as text"""
    for name in options.input:
        if name != "-":
            check_file(pathlib.Path(name))
    if options.input.count("-") > 1:
        raise UserError("--input: standard input can be read only once")
    tokenizer = open_tokenizer(pathlib.Path(options.tokenizer))
    end = [] if options.append_eod is None else [find_eod(tokenizer, options.append_eod)]
    left_out = 0
    with contextlib.ExitStack() as open_files:
        with interrupts_held():
            writer = open_files.enter_context(PairWriter(options.output, tokenizer.vocabulary, options.overwrite))
        for batch in batches(read_documents(options)):
            for ids in tokenizer.encode(batch):
                if ids:
                    writer.add(ids + end)
                else:
                    left_out += 1
        if writer.tokens == 0:
            raise UserError(f"the input holds no tokens: {', '.join(options.input)}")
        writer.finish()
    report = (f"wrote {writer.bin} and {writer.idx}\n"
              f"{writer.documents} documents, {writer.tokens} tokens of {writer.dtype}, vocabulary {tokenizer.vocabulary}")
    return report + (f"; {left_out} empty documents were left out" if left_out else "")


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see --help")


def parse(arguments):
    parser = Parser(prog="tokenize_text.py", description=__doc__.split("\n", maxsplit=1)[0],
                    epilog=__doc__.split("\n\n", maxsplit=2)[2], formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="a tokenizer.json, or a sentencepiece .model")
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE", help="text in UTF-8; - is standard input")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="of the .bin and .idx file")
    parser.add_argument("--format", choices=("text", "jsonl"), default="text", help="jsonl: a string a line (default: text)")
    parser.add_argument("--key", default="text", help="jsonl: the key of the string (default: text)")
    parser.add_argument("--document", choices=("file", "line", "paragraph"), default="file",
                        help="text: what is a document (default: file)")
    parser.add_argument("--append-eod", metavar="TOKEN_OR_ID", help="put this token at the end of each document")
    parser.add_argument("--overwrite", action="store_true", help="replace the files when they exist")
    return parser.parse_args(arguments)


def main(arguments):
    def fail(code, message):
        print(f"tokenize_text: error: {' '.join(str(message).split())}", file=sys.stderr)
        return code

    try:
        print(tokenize(parse(arguments)))
    except UserError as error:
        return fail(2, error)
    except OSError as error:
        return fail(1, error)
    except KeyboardInterrupt:
        return fail(130, "interrupted; nothing was written")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
