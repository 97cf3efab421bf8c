#include "fsdp/trace/overlap.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace fsdp::trace {

IntervalSet unite(std::vector<Interval> intervals) {
  std::erase_if(intervals, [](const Interval& i) { return i.end <= i.begin; });
  std::sort(intervals.begin(), intervals.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  IntervalSet result;
  for (const Interval& interval : intervals) {
    if (!result.empty() && interval.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, interval.end);
    } else {
      result.push_back(interval);
    }
  }
  return result;
}

IntervalSet subtract(const IntervalSet& a, const IntervalSet& b) {
  IntervalSet result;
  auto cut = b.begin();
  for (Interval rest : a) {
    while (cut != b.end() && cut->end <= rest.begin) ++cut;
    for (auto it = cut; it != b.end() && it->begin < rest.end; ++it) {
      if (it->begin > rest.begin) result.push_back({rest.begin, it->begin});
      rest.begin = std::max(rest.begin, it->end);
    }
    if (rest.begin < rest.end) result.push_back(rest);
  }
  return result;
}

Nanoseconds length(const IntervalSet& set) {
  Nanoseconds total = 0;
  for (const Interval& interval : set) total += interval.end - interval.begin;
  return total;
}

Nanoseconds overlap(Interval interval, const IntervalSet& set) {
  Nanoseconds total = 0;
  auto it = std::partition_point(set.begin(), set.end(), [&](const Interval& i) { return i.end <= interval.begin; });
  for (; it != set.end() && it->begin < interval.end; ++it) {
    total += std::min(it->end, interval.end) - std::max(it->begin, interval.begin);
  }
  return total;
}

int OverlapReport::count(Kind kind) const {
  return static_cast<int>(
      std::count_if(collectives.begin(), collectives.end(), [&](const auto& c) { return c.span.kind == kind; }));
}

int OverlapReport::overlapped(Kind kind) const {
  return static_cast<int>(std::count_if(collectives.begin(), collectives.end(),
                                        [&](const auto& c) { return c.span.kind == kind && c.overlapped(); }));
}

OverlapReport overlap_report(std::span<const Span> spans) {
  std::vector<Interval> compute, wait, communication;
  Nanoseconds first = std::numeric_limits<Nanoseconds>::max();
  Nanoseconds last = std::numeric_limits<Nanoseconds>::min();
  for (const Span& span : spans) {
    if (span.end == kUnset || span.kind == Kind::unit) continue;
    Interval interval{span.begin, span.end};
    first = std::min(first, span.begin);
    last = std::max(last, span.end);
    if (span.kind == Kind::compute)
      compute.push_back(interval);
    else if (span.kind == Kind::wait)
      wait.push_back(interval);
    else
      communication.push_back(interval);
  }
  OverlapReport report;
  if (first > last) return report;
  const IntervalSet busy = subtract(unite(std::move(compute)), unite(std::move(wait)));
  const IntervalSet moving = unite(std::move(communication));
  const IntervalSet exposed = subtract(moving, busy);
  report.compute = length(busy);
  report.communication = length(moving);
  report.exposed = length(exposed);
  report.hidden = report.communication - report.exposed;
  report.elapsed = last - first;
  report.idle = report.elapsed - report.compute - report.exposed;
  for (const Span& span : spans) {
    if (!is_communication(span.kind) || span.end == kUnset || span.end == span.begin) continue;
    report.collectives.push_back({span, overlap({span.begin, span.end}, busy)});
  }
  return report;
}

std::string to_string(const OverlapReport& report) {
  auto milliseconds = [](Nanoseconds n) { return static_cast<double>(n) * 1e-6; };
  std::string text = fmt::format(
      "elapsed {:.3f} ms, compute {:.3f}, communication {:.3f} (hidden {:.3f}, exposed {:.3f}), idle {:.3f}",
      milliseconds(report.elapsed), milliseconds(report.compute), milliseconds(report.communication),
      milliseconds(report.hidden), milliseconds(report.exposed), milliseconds(report.idle));
  for (Kind kind : {Kind::all_gather, Kind::reduce_scatter, Kind::all_reduce, Kind::all_to_all}) {
    if (report.count(kind) > 0)
      text += fmt::format("; {} {} of {} overlapped", to_string(kind), report.overlapped(kind), report.count(kind));
  }
  return text;
}

}  // namespace fsdp::trace
