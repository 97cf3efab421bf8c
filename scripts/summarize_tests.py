"""Counts the tests of one run of ctest; its own closing lines count skipped ones as passed.

Usage: summarize_tests.py RESULTS     the file that ctest --output-junit wrote

Names what was skipped, with the reason, and what failed; the last line is "N passed, N failed, N skipped". Exit code 1
when a test failed or none passed.
"""

import re
import sys
import xml.etree.ElementTree as xml

GTEST_REASON = re.compile(r": Skipped\n(.*?)\n?\[  SKIPPED \]", re.DOTALL)


def skip_reason(case):
    """Why a test was skipped; None when it was not run for a reason that is a failure (no executable, say)."""
    if case.get("status") == "disabled":
        return "disabled"
    skipped = case.find("skipped")
    if skipped is None or not skipped.get("message", "").startswith("SKIP_"):
        return None
    output = case.findtext("system-out", "")
    reason = GTEST_REASON.search(output)
    lines = (reason[1] if reason else output).strip().splitlines()
    return lines[-1] if lines else skipped.get("message")


def main(results):
    passed, failed, skipped = 0, [], []
    for case in xml.parse(results).getroot().iter("testcase"):
        name = case.get("name")
        if case.get("status") == "run":
            passed += 1
        elif case.get("status") != "fail" and (reason := skip_reason(case)) is not None:
            skipped.append(f"skipped: {name} ({reason})")
        else:
            failed.append(f"failed: {name}")
    for line in skipped + failed:
        print(line)
    print(f"{passed} passed, {len(failed)} failed, {len(skipped)} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
