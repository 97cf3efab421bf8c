"""tools/tokenize_text.py with tiny tokenizers trained here: what it writes, read back independently, and what it refuses.

Needs the wheels of scripts/requirements-tokenize.txt. Without them the tests fail and say how to install them; another
Python that has them is named with FSDP_TOKENIZE_PYTHON.
"""

import json
import os
import pathlib
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import unittest

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = REPOSITORY / "tools" / "tokenize_text.py"
VENV_PYTHON = REPOSITORY / ".venv" / "bin" / "python"
PYTHON = os.environ.get("FSDP_TOKENIZE_PYTHON") or (str(VENV_PYTHON) if VENV_PYTHON.exists() else sys.executable)
INSTALL = f"{PYTHON} -m pip install --no-deps -r scripts/requirements-tokenize.txt"

# Run by PYTHON: trains both tokenizers into the folder given. Ids of the BPE are bytes first, so any text has them.
TRAIN = """
import io, sys
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
folder = sys.argv[1]
words = [f"king{i} spoke unto the people of city{i % 13} and they went" for i in range(400)]
bpe = Tokenizer(models.BPE())
bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bpe.decoder = decoders.ByteLevel()
bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, special_tokens=["<|end|>", "<|begin|>"],
                        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
bpe.save(folder + "/plain.json")
# As tokenizers are shared: one that adds a begin token, and was saved with truncation and padding.
bpe.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", bpe.token_to_id("<|begin|>"))])
bpe.enable_truncation(4)
bpe.enable_padding(length=4)
bpe.save(folder + "/tokenizer.json")
small = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
small.save(folder + "/small.json")
huge = Tokenizer(models.WordLevel(vocab={"a": 0, "b": 70000}, unk_token="a"))
huge.pre_tokenizer = pre_tokenizers.Whitespace()
huge.save(folder + "/wide.json")
Tokenizer(models.BPE()).save(folder + "/empty.json")
model = io.BytesIO()
sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=model, vocab_size=60, byte_fallback=False,
                                         minloglevel=2, add_dummy_prefix=False)
open(folder + "/sp.model", "wb").write(model.getvalue())
"""

# Run by PYTHON: the tokenizer's own view. Prints the ids of each text of a JSON list, or the text of each list of ids.
ENCODE = """
import json, sys
texts = json.load(sys.stdin)
if sys.argv[1].endswith(".model"):
    import sentencepiece
    print(json.dumps([sentencepiece.SentencePieceProcessor(model_file=sys.argv[1]).encode(text) for text in texts]))
else:
    from tokenizers import Tokenizer
    print(json.dumps([Tokenizer.from_file(sys.argv[1]).encode(text, add_special_tokens=False).ids for text in texts]))
"""


def read_pair(prefix):
    """-> (type code of struct, documents as lists of ids). Reads as docs/data.md says, and nothing else."""
    index = pathlib.Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, entries = struct.unpack_from("<9sQBQQ", index)
    assert magic == b"MMIDIDX\0\0" and version == 1, (magic, version)
    kind = {1: "B", 8: "H", 4: "i"}[code]
    sizes = struct.unpack_from(f"<{sequences}i", index, 34)
    pointers = struct.unpack_from(f"<{sequences}q", index, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{entries}q", index, 34 + 12 * sequences)
    assert len(index) == 34 + 12 * sequences + 8 * entries, len(index)
    data = pathlib.Path(f"{prefix}.bin").read_bytes()
    width = struct.calcsize(kind)
    assert len(data) == sum(sizes) * width, len(data)
    assert documents[0] == 0 and documents[-1] == sequences, documents
    result = []
    for first, end in zip(documents, documents[1:]):
        result.append([token for i in range(first, end) for token in struct.unpack_from(f"<{sizes[i]}{kind}", data, pointers[i])])
    assert all(pointer == width * sum(sizes[:i]) for i, pointer in enumerate(pointers)), pointers
    return kind, result


class Tokenize(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        for wheel in ("tokenizers", "sentencepiece"):
            done = subprocess.run([PYTHON, "-c", f"import {wheel}"], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise AssertionError(f"the wheel {wheel} is missing; install it with: {INSTALL}\n{done.stderr}")
        cls.shared = tempfile.TemporaryDirectory()
        cls.tokenizers = pathlib.Path(cls.shared.name)
        done = subprocess.run([PYTHON, "-c", TRAIN, cls.shared.name], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise AssertionError(done.stderr)

    @classmethod
    def tearDownClass(cls):
        cls.shared.cleanup()

    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.folder = pathlib.Path(self.temporary.name)

    def write(self, name, content):
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def run_script(self, *arguments, stdin=b"", **options):
        """-> (exit code, output, errors)"""
        command = [PYTHON, str(SCRIPT), *map(str, arguments)]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False, **options)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def run_changed(self, constant, value, tokenizer, path):
        """The script with another value of one constant, whose old one is `tables`."""
        code = (f"import runpy, sys; script = runpy.run_path(sys.argv.pop(1)); names = script['main'].__globals__; "
                f"tables = names['{constant}']; names['{constant}'] = {value}; sys.exit(script['main'](sys.argv[1:]))")
        return subprocess.run([PYTHON, "-c", code, str(SCRIPT), "--tokenizer", str(self.tokenizers / tokenizer), "--input", str(path),
                               "--document", "line", "--output", str(self.folder / "out")], capture_output=True, text=True, check=False)

    def tokenize(self, tokenizer, *inputs, arguments=(), stdin=b""):
        """-> (report, type code, documents)"""
        code, output, errors = self.run_script("--tokenizer", self.tokenizers / tokenizer, "--input", *inputs, "--output",
                                               self.folder / "out", "--overwrite", *arguments, stdin=stdin)
        self.assertEqual((code, errors), (0, ""))
        return (output, *read_pair(self.folder / "out"))

    def encode(self, tokenizer, texts):
        done = subprocess.run([PYTHON, "-c", ENCODE, str(self.tokenizers / tokenizer)], input=json.dumps(texts),
                              capture_output=True, text=True, check=True)
        return json.loads(done.stdout)

    def assert_refused(self, expected, *arguments, code=2, left=(), **options):
        before = sorted(path.name for path in self.folder.iterdir())
        got, output, errors = self.run_script(*arguments, **options)
        self.assertIn(expected, errors)
        self.assertEqual((got, output), (code, ""), errors)
        self.assertEqual(errors.count("\n"), 1, errors)
        self.assertTrue(errors.startswith("tokenize_text: error: "), errors)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), sorted([*before, *left]))

    def test_documents_of_every_kind(self):
        text = "king1 spoke\n\nthe people\nwent \u00e9\n \t\n\nlast"
        path = self.write("a.txt", text)
        expected = {
            "file": [text],
            "line": ["king1 spoke", "the people", "went \u00e9", " \t", "last"],
            "paragraph": ["king1 spoke", "the people\nwent \u00e9", "last"],
        }
        for document, texts in expected.items():
            report, kind, documents = self.tokenize("plain.json", path, arguments=("--document", document))
            self.assertEqual(documents, self.encode("plain.json", texts), document)
            self.assertEqual(kind, "H")
            tokens = sum(map(len, documents))
            self.assertIn(f"{len(texts)} documents, {tokens} tokens of uint16, vocabulary 400", report)
        self.assertIn("2 empty documents were left out", self.tokenize("plain.json", path, arguments=("--document", "line"))[0])
        self.assertEqual(sorted(os.listdir(self.folder)), ["a.txt", "out.bin", "out.idx"])

    def test_several_inputs_and_standard_input(self):
        paths = [self.write("a", "the king"), self.write("b", "the people")]
        _, _, documents = self.tokenize("plain.json", *paths, "-", stdin="they went\n".encode())
        self.assertEqual(documents, self.encode("plain.json", ["the king", "the people", "they went\n"]))

    def test_json_lines(self):
        path = self.write("a.jsonl", '{"text": "the king", "id": 3}\n\n{"text": ""}\r\n{"text": "a\\nb"}')
        report, _, documents = self.tokenize("plain.json", path, arguments=("--format", "jsonl"))
        self.assertEqual(documents, self.encode("plain.json", ["the king", "a\nb"]))
        self.assertIn("1 empty documents were left out", report)
        path = self.write("b.jsonl", '{"body": "they went"}')
        _, _, documents = self.tokenize("plain.json", path, arguments=("--format", "jsonl", "--key", "body"))
        self.assertEqual(documents, self.encode("plain.json", ["they went"]))

    def test_many_documents_keep_their_order(self):
        texts = [f"king{i} went to city{i % 7}" for i in range(3456)]
        path = self.write("a", "\n".join(texts))
        for tokenizer in ("plain.json", "sp.model"):
            _, _, documents = self.tokenize(tokenizer, path, arguments=("--document", "line"))
            self.assertEqual(documents, self.encode(tokenizer, texts))

    def test_nothing_is_added_cut_or_padded(self):
        text = "king1 spoke unto the people and they went"
        _, _, documents = self.tokenize("tokenizer.json", self.write("a", text))
        self.assertEqual(documents, self.encode("plain.json", [text]))
        self.assertGreater(len(documents[0]), 4)

    def test_end_of_document(self):
        path = self.write("a", "the king\nthe people\n\n")
        arguments = ("--document", "line", "--append-eod")
        plain = self.encode("plain.json", ["the king", "the people"])
        end = 0  # the first special token
        for name in ("<|end|>", "0"):
            _, _, documents = self.tokenize("plain.json", path, arguments=(*arguments, name))
            self.assertEqual(documents, [ids + [end] for ids in plain])
        _, _, documents = self.tokenize("sp.model", path, arguments=(*arguments, "</s>"))
        self.assertEqual(documents, [ids + [2] for ids in self.encode("sp.model", ["the king", "the people"])])

    def test_sentencepiece(self):
        text = "king7 spoke unto the people"
        report, kind, documents = self.tokenize("sp.model", self.write("a", text))
        self.assertEqual(documents, self.encode("sp.model", [text]))
        self.assertEqual(kind, "B")  # a vocabulary of 60
        self.assertIn("uint8, vocabulary 60", report)

    def test_the_type_follows_from_the_largest_id(self):
        self.assertEqual(self.tokenize("small.json", self.write("a", "abba"))[1:], ("B", [[0, 1, 1, 0]]))
        self.assertEqual(self.tokenize("wide.json", self.write("a", "b a"))[1:], ("i", [[70000, 0]]))
        done = self.run_changed("DTYPES", "tables[:2]", "wide.json", self.write("a", "a"))  # as if there were no int32
        self.assertEqual(done.returncode, 2)
        self.assertIn("wide.json: token ids up to 70000, expected 65535 at most", done.stderr)

    def test_long_documents_are_several_sequences(self):
        path = self.write("a", "abba\nababa\na\nabbaabbaa")
        done = self.run_changed("LONGEST_SEQUENCE", "4", "small.json", path)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(struct.unpack_from("<7i", (self.folder / "out.idx").read_bytes(), 34), (4, 4, 1, 1, 4, 4, 1))
        self.assertEqual(["".join("ab"[i] for i in ids) for ids in read_pair(self.folder / "out")[1]],
                         ["abba", "ababa", "a", "abbaabbaa"])

    def test_old_files_stay(self):
        arguments = ("--tokenizer", self.tokenizers / "plain.json", "--input", self.write("a", "the king"), "--output")
        for ending in (".bin", ".idx"):
            old = self.write(f"out{ending}", "old")
            self.assert_refused(f"out{ending} exists: choose another name, or give --overwrite", *arguments, self.folder / "out")
            self.assertEqual(old.read_text(), "old")
            old.unlink()
        self.write("out.idx", "old")
        self.assertEqual(self.run_script(*arguments, self.folder / "out.bin", "--overwrite")[0], 0)
        self.assertEqual(read_pair(self.folder / "out")[1], self.encode("plain.json", ["the king"]))
        self.assertEqual(self.run_script(*arguments, self.folder / "new" / "folder" / "out")[0], 0)
        (self.folder / "taken.bin").mkdir()
        self.assert_refused("taken.bin exists and is not a regular file", *arguments, self.folder / "taken", "--overwrite")
        self.assert_refused("names no file", *arguments, f"{self.folder}/")
        self.assert_refused("cannot be written", *arguments, "/proc/none/out")

    def test_tokenizers_that_cannot_be_read(self):
        rest = ("--input", self.write("a", "x"), "--output", self.folder / "out")
        self.assert_refused("none.json does not exist", "--tokenizer", self.folder / "none.json", *rest)
        self.assert_refused("is a folder, expected a file", "--tokenizer", self.folder, *rest)
        self.assert_refused("bad.json is no tokenizer.json:", "--tokenizer", self.write("bad.json", "{}"), *rest)
        self.assert_refused("bad.model is no sentencepiece model:", "--tokenizer", self.write("bad.model", "{}"), *rest)
        self.assert_refused("the tokenizer has no tokens", "--tokenizer", self.tokenizers / "empty.json", *rest)

    def test_a_missing_wheel(self):
        for wheel, tokenizer in (("tokenizers", "plain.json"), ("sentencepiece", "sp.model")):
            hidden = self.folder / f"no_{wheel}"
            hidden.mkdir()
            (hidden / f"{wheel}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{wheel}'\")\n")
            self.assert_refused(f"the wheel {wheel} is missing (No module named '{wheel}'); install it with: ", "--tokenizer",
                                self.tokenizers / tokenizer, "--input", self.write("a", "x"), "--output", self.folder / "out",
                                env={**os.environ, "PYTHONPATH": str(hidden), "PYTHONDONTWRITEBYTECODE": "1"})

    def test_wrong_input(self):
        def refuse(expected, content, *arguments):
            self.assert_refused(expected, "--tokenizer", self.tokenizers / "plain.json", "--input", self.write("a", content),
                                "--output", self.folder / "out", *arguments)

        refuse("the input holds no tokens: ", "")
        refuse("the input holds no tokens: ", "\n\n", "--document", "line")
        refuse("a: this is no UTF-8: invalid start byte at byte 2", b"ab\xff")
        refuse("a:2: this is no UTF-8", b"ab\n\xff", "--document", "paragraph")
        refuse("a:2: this is no JSON: ", '{"text": "a"}\n{"text"', "--format", "jsonl")
        refuse("a:1: this is no JSON: ", "[" * 100_000, "--format", "jsonl")
        refuse('a:1: expected the key "text", got only body, id', '{"body": "a", "id": 1}', "--format", "jsonl")
        refuse('a:1: expected the key "text", got only an empty object', "{}", "--format", "jsonl")
        refuse('a:1: expected an object with the key "text", got list', "[1]", "--format", "jsonl")
        refuse('a:1: expected a string under "text", got int', '{"text": 5}', "--format", "jsonl")
        refuse("a:1: half of a surrogate pair", '{"text": "\\ud800"}', "--format", "jsonl")
        refuse('--append-eod: the tokenizer has no token "<eos>"', "x", "--append-eod", "<eos>")
        refuse("--append-eod: id 400 is beyond the vocabulary of 400", "x", "--append-eod", "400")

    def test_wrong_command_lines(self):
        tokenizer = ("--tokenizer", self.tokenizers / "plain.json")
        output = ("--output", self.folder / "out")
        self.assert_refused("the following arguments are required: --tokenizer", "--input", "a", *output)
        self.assert_refused("invalid choice: 'xml'", *tokenizer, "--input", "a", *output, "--format", "xml")
        self.assert_refused("none does not exist", *tokenizer, "--input", self.folder / "none", *output)
        self.assert_refused("is a folder, expected a file", *tokenizer, "--input", self.folder, *output)
        self.assert_refused("standard input can be read only once", *tokenizer, "--input", "-", "-", *output)
        self.assert_refused("the tokenizer has no token \"nope\"", "--tokenizer", self.tokenizers / "sp.model", "--input",
                            self.write("a", "x"), *output, "--append-eod", "nope")
        code, text, _ = self.run_script("--help")
        self.assertEqual(code, 0)
        self.assertIn("--append-eod", text)

    def test_a_full_disk_leaves_nothing(self):
        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

        self.assert_refused("File too large", "--tokenizer", self.tokenizers / "plain.json", "--input",
                            self.write("a", "the king went " * 3000), "--output", self.folder / "out", code=1, preexec_fn=limit,
                            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})

    def test_an_interrupt_leaves_nothing(self):
        command = [PYTHON, str(SCRIPT), "--tokenizer", str(self.tokenizers / "plain.json"), "--input", "-", "--document", "line",
                   "--output", str(self.folder / "out")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdin.write(b"the king\n" * 2000)  # two batches
            process.stdin.flush()
            while not (self.folder / "out.bin.part").exists():
                self.assertIsNone(process.poll())
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.wait(timeout=60), 130)
            self.assertEqual(process.stderr.read().decode(), "tokenize_text: error: interrupted; nothing was written\n")
        self.assertEqual(list(self.folder.iterdir()), [])


if __name__ == "__main__":
    unittest.main()
