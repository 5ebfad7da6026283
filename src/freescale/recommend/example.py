"""Runs the model of this folder with plain torch.

    python example.py
    python example.py '{"items": ["a", "b"], "times": [1700000000, 1700000060]}'

Events are in order of time. serving.json lists what the model reads.
"""

import json
import sys
from pathlib import Path

import torch


def main(folder: Path) -> None:
    about = json.loads((folder / "serving.json").read_text(encoding="utf-8"))
    ids = json.loads((folder / "items.json").read_text(encoding="utf-8"))
    request = json.loads(sys.argv[1]) if len(sys.argv) > 1 else about["example"]
    rows = {item: row for row, item in enumerate(ids) if item is not None}

    known = [n for n, item in enumerate(request["items"]) if item in rows]
    known = known[-about["max_length"] :]  # the last events count
    if not known:
        sys.exit("no item of the history is known: recommend what is popular")
    given = {**request, "lengths": len(known), "items": [rows.get(x) for x in request["items"]]}
    given["candidates"] = [rows[item] for item in request.get("candidates", [])]
    inputs = {}
    for name, shape in ((each["name"], each["shape"]) for each in about["inputs"]):
        values = [given[name][n] for n in known] if "length" in shape else given[name]
        inputs[name] = torch.tensor([values])  # a batch of one history
    output = torch.export.load(folder / "encoder.pt2").module()(**inputs)[0]

    if about["task"] == "ranking":
        for item, chances in zip(request["candidates"], output.tolist(), strict=True):
            print(item, *(f"{chance:.7f}" for chance in chances), sep="\t")
        return
    vectors = torch.load(folder / "item_vectors.pt", mmap=True, weights_only=True)
    scores = vectors @ output
    scores[[item is None for item in ids]] = -torch.inf
    best = scores.topk(min(10, len(rows)))
    for score, row in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        print(ids[row], f"{score:.7f}", sep="\t")


if __name__ == "__main__":
    with torch.no_grad():
        main(Path(__file__).parent)
