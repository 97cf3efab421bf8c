"""The README shows the example that is built and run, and the links between the documents lead somewhere."""

import pathlib
import re
import subprocess
import unittest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s#]+)[^)]*\)|<(?:img|source)[^>]*\bsrc(?:set)?=\"([^\"]+)\"")


def documents():
    return [path for path in [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").rglob("*.md")]]


class Documents(unittest.TestCase):
    def test_readme_shows_the_quickstart(self):
        example = (REPOSITORY / "examples/quickstart/main.cpp").read_text()
        self.assertIn(f"```cpp\n{example}```", (REPOSITORY / "README.md").read_text(),
                      "README.md must show examples/quickstart/main.cpp, word for word, as a ```cpp block")

    def test_links_between_documents(self):
        for document in documents():
            text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
            for match in LINK.finditer(text):
                target = match[1] or match[2]
                if "://" in target or target.startswith("mailto:"):
                    continue
                self.assertTrue((document.parent / target).exists(), f"{document.relative_to(REPOSITORY)} links to {target}, which is not there")

    def test_every_dependency_is_documented(self):
        text = (REPOSITORY / "docs/dependencies.md").read_text()
        for line in (REPOSITORY / "scripts/packages.txt").read_text().splitlines():
            if line and not line.startswith("#"):
                self.assertIn(f"`{line}`", text, f"docs/dependencies.md does not say what {line} is for")

    def test_scripts_parse(self):
        for script in [*REPOSITORY.glob("scripts/*.sh"), *REPOSITORY.glob("tests/**/*.sh"), REPOSITORY / ".ci/run"]:
            done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
