#!/usr/bin/env python3
"""The loss of a Llama of the package transformers, on weights that `fsdp train` then begins with, must be its loss too;
and weights that it exports must give transformers the same logits. Needs transformers, so it is not part of ctest.

  llama_parity.py FSDP_COMMAND        e.g. build/bin/fsdp"""
import json
import pathlib
import subprocess
import sys
import tempfile

import torch
import torch.nn.functional as F
import transformers

CONTEXT = 64
SHAPE = dict(vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1e4)


def main():
    fsdp = sys.argv[1]
    folder = pathlib.Path(tempfile.mkdtemp())
    # Every window of the text holds the same tokens, whatever the order of windows; only where an epoch begins is drawn.
    period = torch.randperm(CONTEXT, generator=torch.Generator().manual_seed(3)) + 40
    (folder / "text").write_bytes(bytes(period.tolist()) * 400)
    for tied in (False, True):
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=tied, **SHAPE)).float()
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(std=0.08) if p.dim() > 1 else p.uniform_(0.5, 1.5)
        model.save_pretrained(folder / "theirs", max_shard_size="200KB")  # several files
        tokens = period[None]
        turned = torch.stack([period.roll(-k) for k in range(CONTEXT)])
        logits = model(turned).logits
        losses = [F.cross_entropy(logits[k], turned[k].roll(-1)).item() for k in range(CONTEXT)]
        config = folder / "config.toml"
        config.write_text(f"""
[model]
preset = "tiny"
layers = 3
width = 64
heads = 4
kv_heads = 2
ffn_width = 176
max_context = 256
tied_embeddings = {str(tied).lower()}
[data]
files = ["{folder}/text"]
[run]
device = "cpu"
ranks = 2
steps = 1
batch = 4
context = {CONTEXT}
sample_length = 0
[optimizer]
learning_rate = 0.0
[checkpoint]
folder = "{folder}/checkpoints-{tied}"
weights = "{folder}/theirs"
weights_format = "llama"
""")
        subprocess.run([fsdp, "train", "--config", config, "--log", folder / "log.jsonl"], check=True)
        ours = json.loads(open(folder / "log.jsonl").readline())["loss"]
        apart = sorted(abs(loss - ours) / ours for loss in losses)
        assert apart[0] < 1e-6 and apart[1] > 1e-5, apart  # that of one beginning, and of no other
        subprocess.run([fsdp, "checkpoint", "export", folder / f"checkpoints-{tied}" / "step-00000001", "--names", "llama",
                        "--output", folder / "ours" / "model.safetensors"], check=True)
        (folder / "ours" / "config.json").write_text((folder / "theirs" / "config.json").read_text())
        back = transformers.LlamaForCausalLM.from_pretrained(folder / "ours", dtype=torch.float32)
        assert torch.equal(back(tokens).logits, model(tokens).logits)
        print(json.dumps({"bench": "llama_parity", "tied": tied, "loss_fsdp": ours, "loss_transformers": min(losses, key=lambda loss: abs(loss - ours)),
                          "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
