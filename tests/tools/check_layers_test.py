"""tools/check_layers.py on temporary trees: what it lets through, and the message of everything it refuses."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
CHECKER = REPOSITORY / "tools" / "check_layers.py"

RULES = """\
# layers, lowest first
base (pure):
trace (pure): base
comm: base trace   # the transport
mesh: base comm
"""

SOURCES = {
    "fsdp/fsdp.h": '#include "fsdp/mesh/mesh.h"\n#include "fsdp/base/error.h"\n',
    "fsdp/base/error.h": "#include <string>\n",
    "fsdp/trace/span.h": '#include "fsdp/base/error.h"\n',
    "fsdp/comm/comm.h": '#include <ATen/core/Tensor.h>\n#include "fsdp/trace/span.h"\n#include "fsdp/comm/threads/group.h"\n',
    "fsdp/comm/threads/group.h": '#include "fsdp/base/error.h"\n',
    "fsdp/mesh/mesh.h": '#include <fsdp/comm/comm.h>\n#include "torch/nn/module.h"\n',
    "fsdp/CMakeLists.txt": "",
    "apps/main.cpp": '#include "fsdp/fsdp.h"\n#include "models/model.h"\n',
    "models/model.h": '#include "fsdp/mesh/mesh.h"\n',
}


class CheckLayers(unittest.TestCase):
    def run_checker(self, rules=RULES, changes=None, extra_folders=()):
        """-> (exit code, output) on a good tree with some files changed, or removed where the text is None."""
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            files = {**SOURCES, "docs/layers.txt": rules, **(changes or {})}
            for name, text in files.items():
                if text is None:
                    continue
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            for name in extra_folders:
                (root / name).mkdir(parents=True)
            done = subprocess.run([sys.executable, CHECKER, root], capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr

    def assert_refused(self, expected, **tree):
        code, output = self.run_checker(**tree)
        self.assertIn(expected, output)
        self.assertEqual(code, 1, output)

    def test_this_tree(self):
        done = subprocess.run([sys.executable, CHECKER], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_good_tree(self):
        code, output = self.run_checker()
        self.assertEqual(code, 0, output)
        self.assertIn("4 layers, 6 files, 10 includes", output)

    def test_edge_not_listed(self):
        self.assert_refused(
            "fsdp/mesh/mesh.h:2: layer 'mesh' may not include 'trace' (fsdp/trace/span.h); allowed: base, comm (docs/layers.txt:5)",
            changes={"fsdp/mesh/mesh.h": '#pragma once\n#include <fsdp/trace/span.h>\n'})

    def test_edge_upwards(self):
        self.assert_refused("fsdp/base/error.h:1: layer 'base' may not include 'comm' (fsdp/comm/comm.h); allowed: no other layer",
                            changes={"fsdp/base/error.h": '#include "fsdp/comm/comm.h"\n'})

    def test_edge_from_a_nested_folder(self):
        self.assert_refused("fsdp/comm/threads/group.cpp:1: layer 'comm' may not include 'mesh'",
                            changes={"fsdp/comm/threads/group.cpp": '#  include  "fsdp/mesh/mesh.h"\n'})

    def test_edge_by_a_relative_path(self):
        self.assert_refused("fsdp/comm/comm.cpp:1: layer 'comm' may not include 'mesh' (fsdp/mesh/mesh.h)",
                            changes={"fsdp/comm/comm.cpp": '#include "../mesh/mesh.h"\n'})

    def test_neighbour_by_a_relative_path(self):
        code, output = self.run_checker(changes={"fsdp/comm/comm.cpp": '#include "comm.h"\n'})
        self.assertEqual(code, 0, output)

    def test_cycle_of_listed_edges(self):
        self.assert_refused("docs/layers.txt:3: layers in a cycle: trace -> comm -> mesh -> trace",
                            rules="base (pure):\n\ntrace: base comm\ncomm: mesh base trace\nmesh: trace base comm\n")

    def test_layer_without_folder(self):
        self.assert_refused("docs/layers.txt:6: layer 'optim' has no folder fsdp/optim", rules=RULES + "optim: base\n")

    def test_folder_without_layer(self):
        self.assert_refused("fsdp/optim: this folder is not a layer of docs/layers.txt", extra_folders=["fsdp/optim"])

    def test_listed_edge_to_no_layer(self):
        self.assert_refused("docs/layers.txt:5: layer 'mesh' lists 'com', which is not a layer", rules=RULES.replace("mesh: base", "mesh: com base"))

    def test_include_of_no_layer(self):
        self.assert_refused("fsdp/mesh/mesh.h:1: 'optim' is not a layer of docs/layers.txt: fsdp/optim/adamw.h",
                            changes={"fsdp/mesh/mesh.h": '#include "fsdp/optim/adamw.h"\n'})

    def test_libtorch_in_a_pure_layer(self):
        for header in ("torch/torch.h", "ATen/ATen.h", "c10/util/Half.h"):
            self.assert_refused(f"fsdp/trace/span.h:2: layer 'trace' is pure and includes nothing of LibTorch: {header} (docs/layers.txt:3)",
                                changes={"fsdp/trace/span.h": f"\n#include <{header}>\n"})

    def test_pure_layer_on_one_that_is_not(self):
        self.assert_refused("docs/layers.txt:2: pure layer 'trace' lists 'base', which is not pure",
                            rules="base:\ntrace (pure): base\ncomm: base trace\nmesh: base comm\n")

    def test_users_of_the_library(self):
        for header in ("apps/fsdp/train.h", "models/model.h", "tests/support/world.h"):
            self.assert_refused(f"fsdp/mesh/mesh.h:1: fsdp/ includes nothing of {header.split('/')[0]}/, its user: {header}",
                                changes={"fsdp/mesh/mesh.h": f'#include "{header}"\n'})
            self.assert_refused("fsdp/fsdp.h:1: fsdp/ includes nothing of", changes={"fsdp/fsdp.h": f'#include "{header}"\n'})

    def test_umbrella_in_a_layer(self):
        self.assert_refused("fsdp/mesh/mesh.h:1: fsdp/fsdp.h is for users", changes={"fsdp/mesh/mesh.h": '#include "fsdp/fsdp.h"\n'})

    def test_file_outside_every_layer(self):
        self.assert_refused("fsdp/helpers.h: a source file in fsdp/ belongs into the folder of a layer", changes={"fsdp/helpers.h": ""})

    def test_comments_are_no_includes(self):
        text = '// #include "fsdp/mesh/mesh.h"\n/*\n#include "fsdp/mesh/mesh.h"\n*/\nconst char* s = "/*";\n#include "fsdp/comm/comm.h" // */\n'
        code, output = self.run_checker(changes={"fsdp/base/error.h": text})
        self.assertEqual(code, 1, output)
        self.assertIn("fsdp/base/error.h:6: layer 'base' may not include 'comm'", output)
        self.assertNotIn("'mesh'", output)

    def test_rules_that_cannot_be_read(self):
        for rules, expected in ((None, "layers.txt: no such file"), ("# nothing\n", "lists no layer"),
                                ("base -> trace\n", "docs/layers.txt:1: expected 'layer: layers'"),
                                ("base:\nbase:\n", "docs/layers.txt:2: layer 'base' is listed twice, first in line 1")):
            code, output = self.run_checker(rules=rules)
            self.assertEqual(code, 2, output)
            self.assertIn(expected, output)


if __name__ == "__main__":
    unittest.main()
