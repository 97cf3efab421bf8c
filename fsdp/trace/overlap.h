// How much communication hid behind compute: interval arithmetic on spans, from unions and never from sums.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fsdp/trace/span.h"

namespace fsdp::trace {

struct Interval {
  Nanoseconds begin = 0;
  Nanoseconds end = 0;  // exclusive
  bool operator==(const Interval&) const = default;
};

// Sorted, disjoint, without empty members.
using IntervalSet = std::vector<Interval>;

[[nodiscard]] IntervalSet unite(std::vector<Interval> intervals);
[[nodiscard]] IntervalSet subtract(const IntervalSet& a, const IntervalSet& b);
[[nodiscard]] Nanoseconds length(const IntervalSet& set);
[[nodiscard]] Nanoseconds overlap(Interval interval, const IntervalSet& set);

struct CollectiveOverlap {
  Span span;
  Nanoseconds hidden = 0;  // under compute
  [[nodiscard]] Nanoseconds duration() const { return span.end - span.begin; }
  // The library's rule: at least 90 % of it runs under compute.
  [[nodiscard]] bool overlapped() const { return duration() > 0 && hidden * 10 >= duration() * 9; }
};

struct OverlapReport {
  std::vector<CollectiveOverlap> collectives;  // [issue order]; zero-length ones (no bytes moved) are left out
  Nanoseconds communication = 0;               // union over all streams
  Nanoseconds hidden = 0;                      // of it, under compute
  Nanoseconds exposed = 0;                     // of it, while no compute ran
  Nanoseconds compute = 0;                     // union of compute, waits taken out
  Nanoseconds idle = 0;                        // neither compute nor communication, between first and last span
  Nanoseconds elapsed = 0;                     // first begin to last end

  [[nodiscard]] int count(Kind kind) const;
  [[nodiscard]] int overlapped(Kind kind) const;
};

// Unfinished spans are ignored. Compute is the union of compute spans minus the union of wait spans.
[[nodiscard]] OverlapReport overlap_report(std::span<const Span> spans);

[[nodiscard]] std::string to_string(const OverlapReport& report);

}  // namespace fsdp::trace
