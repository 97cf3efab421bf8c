#!/usr/bin/env python3
"""Checks that the layers of fsdp/ include each other only as docs/layers.txt allows.

Usage: check_layers.py [ROOT]     (default: the tree this file lies in)

A line of docs/layers.txt is `layer: layers it may include` or `layer (pure): ...`; `#` starts a comment. Refused are
  - an include between layers that is not listed, and cycles among the listed ones;
  - a listed layer without a folder in fsdp/, a folder that is not listed, a source file outside every layer;
  - headers of LibTorch in a pure layer, and a pure layer that lists one that is not;
  - includes of apps/, models/, tests/, bench/, examples/ or of fsdp/fsdp.h anywhere in fsdp/.
fsdp/fsdp.h may include every layer. Exit code: 0 all good, 1 something is refused, 2 docs/layers.txt cannot be read.
"""

import pathlib
import re
import sys

RULES = "docs/layers.txt"
UMBRELLA = "fsdp/fsdp.h"
SOURCES = {".h", ".hpp", ".cuh", ".inc", ".c", ".cc", ".cpp", ".cu"}
LIBTORCH = ("torch/", "ATen/", "c10/", "caffe2/")
USERS = ("apps", "models", "tests", "bench", "examples")

RULE_LINE = re.compile(r"^(?P<layer>\w+)\s*(?P<pure>\(pure\))?\s*:(?P<allowed>[\w\s]*)$")
INCLUDE_LINE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]")


class RulesError(Exception):
    pass


class Layer:
    def __init__(self, line, pure, allowed):
        self.line = line  # in docs/layers.txt
        self.pure = pure
        self.allowed = allowed


def read_rules(root):
    """-> {layer name: Layer}, in the order of the file."""
    path = root / RULES
    if not path.is_file():
        raise RulesError(f"{path}: no such file")
    layers = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#")[0].strip()
        if not text:
            continue
        match = RULE_LINE.match(text)
        if not match:
            raise RulesError(f"{RULES}:{number}: expected 'layer: layers' or 'layer (pure): layers', got '{text}'")
        name = match["layer"]
        if name in layers:
            raise RulesError(f"{RULES}:{number}: layer '{name}' is listed twice, first in line {layers[name].line}")
        layers[name] = Layer(number, bool(match["pure"]), match["allowed"].split())
    if not layers:
        raise RulesError(f"{RULES}: lists no layer")
    return layers


def find_cycle(layers):
    """-> the names along one cycle of the listed edges, first and last equal, or []."""
    done, path = set(), []

    def visit(name):
        if name in path:
            return path[path.index(name):] + [name]
        if name in done or name not in layers:
            return []
        path.append(name)
        for other in layers[name].allowed:
            if other != name and (cycle := visit(other)):
                return cycle
        path.pop()
        done.add(name)
        return []

    for name in layers:
        if cycle := visit(name):
            return cycle
    return []


def check_rules(root, layers):
    """What is wrong with docs/layers.txt itself."""
    for name, layer in layers.items():
        where = f"{RULES}:{layer.line}"
        if not (root / "fsdp" / name).is_dir():
            yield f"{where}: layer '{name}' has no folder fsdp/{name}"
        for other in layer.allowed:
            if other not in layers:
                yield f"{where}: layer '{name}' lists '{other}', which is not a layer"
            elif layer.pure and not layers[other].pure:
                yield f"{where}: pure layer '{name}' lists '{other}', which is not pure"
    if cycle := find_cycle(layers):
        yield f"{RULES}:{layers[cycle[0]].line}: layers in a cycle: {' -> '.join(cycle)}"


def strip_block_comments(text):
    """Removes /* ... */ outside of strings and // comments; keeps the line numbers."""
    token = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
    return token.sub(lambda match: "\n" * match[0].count("\n") if match[0].startswith("/*") else match[0], text)


def read_includes(path):
    """-> (line number, included name) of one file."""
    text = strip_block_comments(path.read_text(errors="replace"))
    for number, line in enumerate(text.splitlines(), 1):
        if match := INCLUDE_LINE.match(line):
            yield number, match[1]


def resolve(root, file, name):
    """The included file relative to the root, when it is one of the tree's; otherwise the name as written."""
    if not name.startswith(("fsdp/",) + tuple(user + "/" for user in USERS)):
        beside = (file.parent / name).resolve()
        if beside.is_file() and beside.is_relative_to(root):
            return beside.relative_to(root).as_posix()
    return name


def check_include(name, layer, layers):
    """What is wrong when a file of `layer` (name) includes `name`, or None."""
    top, _, rest = name.partition("/")
    if top in USERS and rest:
        return f"fsdp/ includes nothing of {top}/, its user: {name}"
    if top == "fsdp" and rest:
        if name == UMBRELLA:
            return f"{UMBRELLA} is for users of the library, not for its layers"
        other = rest.partition("/")[0]
        if other not in layers:
            return f"'{other}' is not a layer of {RULES}: {name}"
        if layer is not None and other != layer and other not in layers[layer].allowed:
            allowed = ", ".join(layers[layer].allowed) or "no other layer"
            return f"layer '{layer}' may not include '{other}' ({name}); allowed: {allowed} ({RULES}:{layers[layer].line})"
    if layer is not None and layers[layer].pure and name.startswith(LIBTORCH):
        return f"layer '{layer}' is pure and includes nothing of LibTorch: {name} ({RULES}:{layers[layer].line})"
    return None


def check(root):
    """-> (complaints, number of files, number of includes)."""
    root = root.resolve()
    layers = read_rules(root)
    complaints = list(check_rules(root, layers))
    library = root / "fsdp"
    for folder in sorted(library.iterdir()) if library.is_dir() else []:
        if folder.is_dir() and folder.name not in layers:
            complaints.append(f"fsdp/{folder.name}: this folder is not a layer of {RULES}")
    files = includes = 0
    for file in sorted(library.rglob("*")):
        if file.suffix not in SOURCES or not file.is_file():
            continue
        files += 1
        relative = file.relative_to(root).as_posix()
        parts = file.relative_to(library).parts
        layer = parts[0] if len(parts) > 1 else None
        if layer is None and relative != UMBRELLA:
            complaints.append(f"{relative}: a source file in fsdp/ belongs into the folder of a layer")
            continue
        if layer is not None and layer not in layers:
            continue  # the folder was named above
        for number, name in read_includes(file):
            includes += 1
            if complaint := check_include(resolve(root, file, name), layer, layers):
                complaints.append(f"{relative}:{number}: {complaint}")
    return complaints, files, includes, len(layers)


def main(arguments):
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(__doc__.strip())
        return 0 if arguments in (["-h"], ["--help"]) else 2
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).parent.parent
    try:
        complaints, files, includes, layers = check(root)
    except RulesError as error:
        print(f"check_layers: error: {error}", file=sys.stderr)
        return 2
    for complaint in complaints:
        print(complaint)
    if complaints:
        print(f"check_layers: {len(complaints)} refused")
        return 1
    print(f"check_layers: {layers} layers, {files} files, {includes} includes: as {RULES} allows")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
