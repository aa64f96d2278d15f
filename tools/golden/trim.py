"""Cut golden vectors to what the tests read: python trim.py FULL_DIR OUT_DIR

Entries of compressed caches (ckv, index_k) are kept for the last 24 only, per-layer rows for the last 3 positions; everything else is copied bit for bit. Standard library only."""
import json, os, struct, sys

KEEP = 24      # compressed entries
ROWS = 3       # positions of per-layer tensors


def read(path):
    with open(path, "rb") as f:
        n = struct.unpack("<Q", f.read(8))[0]
        head = json.loads(f.read(n))
        data = f.read()
    head.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[v["data_offsets"][0]:v["data_offsets"][1]]) for k, v in head.items()}


def write(path, tensors):
    head, off = {}, 0
    for k, (dtype, shape, raw) in tensors.items():
        head[k] = dict(dtype=dtype, shape=shape, data_offsets=[off, off + len(raw)])
        off += len(raw)
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values()))


def main():
    src, dst = sys.argv[1:3]
    os.makedirs(dst, exist_ok=True)
    for name in sorted(os.listdir(src)):
        if not name.endswith(".safetensors"):
            continue
        out = {}
        for k, (dtype, shape, raw) in sorted(read(f"{src}/{name}").items()):
            if k.endswith((".ckv", ".index_k")) and shape[0] > KEEP:
                row = len(raw) // shape[0]
                raw, shape = raw[-KEEP * row:], [KEEP] + shape[1:]
            if k.startswith(("layer", "mtp.")) and not k.endswith((".ckv", ".index_k")):
                row = len(raw) // shape[0]
                raw, shape = raw[-ROWS * row:], [ROWS] + shape[1:]
            out[k] = (dtype, shape, raw)
        write(f"{dst}/{name}", out)
        print(name, os.path.getsize(f"{dst}/{name}"))


if __name__ == "__main__":
    main()
