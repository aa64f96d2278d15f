"""Golden vectors from transformers, and their distance to the committed ones.

    python generate.py [--model testdata/tiny] [--golden testdata/golden] [--out target/golden] [--prompts short,tool]

Widens a checkpoint in the original format to float32, loads it with transformers' DeepseekV4ForCausalLM (code that has
nothing in common with Longwave) and runs the prompts of GOLDEN/*.exact.safetensors on the CPU: one forward pass over
the prompt without a cache, then greedy tokens one by one through transformers' own cache. Writes what it saw to
OUT/NAME.safetensors and prints, per prompt, the relative error of every tensor that both sides hold.

Exits 1 when logits or hidden tensors differ by more than --bound, an argmax differs, or a greedy token differs where the
committed gap to the runner-up exceeds the error. transformers has no MTP module and no quantised cache, so `mtp.*` and
the `*.cache` vectors are not covered here.
"""

import argparse
import json
import os
import sys
import tempfile
import time

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

LAST = 8  # positions whose rows are kept, as in the committed files before trimming
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def widen_fp8(codes, scale):
    """e4m3 codes with one power-of-two scale per 128 x 128 block."""
    rows, cols = codes.shape
    grid = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return codes.float() * grid


def widen_fp4(packed, scale):
    """Two e2m1 codes per byte, low nibble first, one power-of-two scale per 32 columns."""
    raw = packed.view(torch.uint8).int()
    codes = torch.stack([raw & 15, raw >> 4], -1).flatten(1)
    values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return values * scale.float().repeat_interleave(32, 1)


def widen_checkpoint(folder, out):
    """Writes FOLDER as a float32 checkpoint that from_pretrained loads."""
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    for key in ("quantization_config", "expert_dtype"):
        config.pop(key, None)
    config["torch_dtype"] = "float32"
    # The list of the release has one entry more, for the MTP layer; transformers wants one per hidden layer.
    config["compress_ratios"] = config["compress_ratios"][: config["num_hidden_layers"]]
    with open(os.path.join(out, "config.json"), "w") as f:
        json.dump(config, f, indent=1)

    stored = load_file(os.path.join(folder, "model.safetensors"))
    wide = {}
    for name, t in stored.items():
        if name.endswith(".scale") and name[: -len("scale")] + "weight" in stored:
            continue
        scale = stored.get(name[: -len("weight")] + "scale") if name.endswith(".weight") else None
        if t.dtype == torch.int64:
            wide[name] = t
        elif t.dtype == torch.int8:
            wide[name] = widen_fp4(t, scale)
        elif t.dtype == torch.float8_e4m3fn:
            wide[name] = widen_fp8(t, scale)
        else:
            assert scale is None, f"{name}: {t.dtype} with a scale"
            wide[name] = t.float()
    save_file({k: v.contiguous() for k, v in wide.items()}, os.path.join(out, "model.safetensors"), {"format": "pt"})
    return len(wide)


class Recorder:
    """What each layer computes, taken by hooks and by standing in for the attention function."""

    def __init__(self, model):
        self.on, self.rows = False, {}
        inner, recorder = v4.eager_attention_forward, self

        def attention(module, query, key, value, mask, **kwargs):
            out = inner(module, query, key, value, mask, **kwargs)
            if recorder.on:
                n = query.shape[2]
                recorder.put(module.layer_idx, "q", query[0].transpose(0, 1))
                recorder.put(module.layer_idx, "kv", key[0, 0, :n])
                recorder.put(module.layer_idx, "attn", out[0][0])
            return out

        v4.eager_attention_forward = attention
        for i, layer in enumerate(model.model.layers):
            layer.register_forward_hook(lambda m, a, out, i=i: self.put(i, "streams", out[0]))
            compressor = layer.self_attn.compressor
            if compressor is None:
                continue
            compressor.register_forward_hook(lambda m, a, out, i=i: self.put(i, "ckv", out[0][0, 0]))
            if hasattr(compressor, "indexer"):
                compressor.indexer.scorer.register_forward_hook(lambda m, a, out, i=i: self.scores(i, a, out))
                compressor.indexer.register_forward_hook(lambda m, a, out, i=i: self.put(i, "selected", out[0]))

    def put(self, layer, what, value):
        if self.on:
            self.rows[f"layer{layer}.{what}"] = value.detach().clone()

    def scores(self, layer, args, out):
        self.put(layer, "index_k", args[1][0])
        n, entries = out.shape[1:]
        visible = (torch.arange(n) + 1) // 4
        hidden = torch.arange(entries)[None] >= visible[:, None]
        self.put(layer, "index_scores", out[0].masked_fill(hidden, float("-inf")))

    def take(self, last):
        """Rows of the last positions; compressed entries whole."""
        whole = (".ckv", ".index_k")
        rows = {k: v if k.endswith(whole) else v[-last:] for k, v in self.rows.items()}
        self.rows = {}
        return rows


def lower_index_wins(self, k, dim=-1):
    """topk with the rule of the released program: among equal scores the lower entry index wins."""
    values, indices = self.sort(dim=dim, descending=True, stable=True)
    return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))


@torch.no_grad()
def run(model, recorder, ids, tokens):
    """One prompt: recorded tensors, logits of the last positions, greedy continuation with gaps."""
    x = torch.tensor([ids])
    last = min(LAST, len(ids))
    recorder.on = True
    logits = model(input_ids=x, use_cache=False).logits[0, -last:].float()
    recorder.on = False
    out = recorder.take(last)
    for key in [k for k in out if k.endswith(".selected")]:
        out[key] = out[key].sort(-1).values.int()
    out |= {"ids": x[0], "logits_last": logits}

    step = model(input_ids=x, use_cache=True, logits_to_keep=1)
    greedy, gaps = [], []
    for _ in range(tokens):
        best = step.logits[0, -1].float().topk(2)
        greedy.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        step = model(input_ids=torch.tensor([[greedy[-1]]]), cache=step.cache, use_cache=True)
    return out | {"greedy": torch.tensor(greedy), "greedy_gap": torch.tensor(gaps)}


def relative_error(ours, golden):
    """Frobenius norm of the difference over that of the golden tensor, over its finite elements."""
    finite = golden.isfinite()
    assert torch.equal(finite, ours.isfinite()), "masked at different places"
    ours, golden = ours[finite].double(), golden[finite].double()
    size = golden.norm()
    return float((ours - golden).norm() / size if size > 0 else (ours - golden).norm())


def compare(name, ours, golden, bound):
    """Prints the distances of one prompt; returns whether all are within `bound`."""
    errors, picks, swapped = {}, 0, 0
    for key, want in golden.items():
        if key in ("ids", "greedy", "greedy_gap") or key.startswith("mtp") or want.numel() == 0:
            continue
        got = ours[key][-want.shape[0]:]
        if key.endswith(".selected"):
            for a, b in zip(got.tolist(), want.tolist()):
                a, b = set(a) - {-1}, set(b) - {-1}
                picks, swapped = picks + len(b), swapped + len(b - a)
        else:
            errors[key] = relative_error(got, want)
    worst = max(errors, key=errors.get)
    rows = golden["logits_last"].shape[0]
    argmax = int((ours["logits_last"].argmax(-1) == golden["logits_last"].argmax(-1)).sum())
    same = (ours["greedy"] == golden["greedy"]).tolist()
    # After the first difference the two texts are different prompts.
    first = same.index(False) if False in same else len(same)
    noise = 4 * errors["logits_last"] * float(golden["logits_last"].abs().max())
    tie = first < len(same) and float(golden["greedy_gap"][first]) <= noise
    print(f"{name:11} {len(ours['ids']):5} tokens  logits {errors['logits_last']:.1e}  argmax {argmax}/{rows}  greedy {first}/{len(same)}"
          f"{' (a tie)' if tie else ''}  picks {picks - swapped}/{picks}  {len(errors)} tensors, worst {errors[worst]:.1e} ({worst})")
    return max(errors.values()) <= bound and argmax == rows and (first == len(same) or tie)


def main():
    root = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
    parser = argparse.ArgumentParser(description="Golden vectors from transformers, compared with the committed ones.")
    parser.add_argument("--model", default=os.path.join(root, "testdata", "tiny"))
    parser.add_argument("--golden", default=os.path.join(root, "testdata", "golden"))
    parser.add_argument("--out", default=os.path.join(root, "target", "golden"))
    parser.add_argument("--prompts", default="short,text300,tool,needle2000")
    parser.add_argument("--tokens", type=int, default=64, help="greedy tokens per prompt, at most those committed")
    parser.add_argument("--bound", type=float, default=1e-5, help="largest relative error of any tensor")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)

    started = time.time()
    torch.Tensor.topk = lower_index_wins
    with tempfile.TemporaryDirectory() as folder:
        count = widen_checkpoint(args.model, folder)
        model, report = v4.DeepseekV4ForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not report["missing_keys"], f"transformers found no weights for {sorted(report['missing_keys'])[:5]}"
    left = [k for k in report["unexpected_keys"] if not k.startswith("mtp.")]
    assert not left, f"transformers did not read {sorted(left)[:5]}"
    recorder = Recorder(model.eval())
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: {count} tensors in float32")

    good = True
    for name in args.prompts.split(","):
        golden = load_file(os.path.join(args.golden, f"{name}.exact.safetensors"))
        golden["greedy"], golden["greedy_gap"] = golden["greedy"][: args.tokens], golden["greedy_gap"][: args.tokens]
        ours = run(model, recorder, golden["ids"].tolist(), len(golden["greedy"]))
        save_file({k: v.contiguous() for k, v in ours.items()}, os.path.join(args.out, f"{name}.safetensors"))
        good &= compare(name, ours, golden, args.bound)
    print(f"{'all within' if good else 'NOT within'} {args.bound:.0e}; {time.time() - started:.0f} s; written to {os.path.normpath(args.out)}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
