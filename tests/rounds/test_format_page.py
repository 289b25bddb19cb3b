"""Reads the store of a real run with nothing but the rules of FORMAT.md: the reader part imports nothing of Atoll."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from typing import Any

import numpy as np
import pytest
import xxhash

from repository import ROOT

pytestmark = pytest.mark.docs

PAGE = ROOT / "FORMAT.md"


class Page:
    """A reader written from the page alone. `objects` is every key with its bytes."""

    def __init__(self, objects: dict[str, bytes], run: str) -> None:
        self.recomputed = 0
        self.objects, self.prefix = objects, f"runs/{run}/sync/"
        self.agreement, self.agreement_digest = self.record("agreement.json", "agreement")

    def record(self, name: str, kind: str) -> tuple[dict[str, Any], str]:  # section 2
        data = self.objects[self.prefix + name]
        found = re.search(rb',"xxh3":"([0-9a-f]{16})"\}\Z', data)
        assert found, name
        assert xxhash.xxh3_64_hexdigest(data[: found.start()] + b"}") == found[1].decode()
        value = json.loads(data)
        assert value["kind"] == kind
        return value, xxhash.xxh3_128_hexdigest(data)

    def frame(self, name: str, kind: str) -> tuple[dict[str, Any], bytes]:  # section 3
        data = self.objects[self.prefix + name]
        magic, version, zero, header, zero_too, payload = struct.unpack("<4sHHIIQ", data[:24])
        assert (magic, version, zero, zero_too) == (b"ATOL", 1, 0, 0)
        assert header <= 1_048_576
        assert (32 + header) % 64 == 0
        assert len(data) == 32 + header + payload
        assert xxhash.xxh3_64_intdigest(data[:24] + data[32 : 32 + header]) == struct.unpack("<Q", data[24:32])[0]
        head = json.loads(data[32 : 32 + header])
        assert head["kind"] == kind
        assert xxhash.xxh3_64_hexdigest(data[32 + header :]) == head["xxh3"]
        return head, data[32 + header :]

    def blob(self, blob: dict[str, Any]) -> bytes:  # section 6
        whole = b""
        for i, (size, check) in enumerate(blob["pieces"]):
            piece = self.objects[f"{self.prefix}blobs/{blob['round']:010d}-{blob['digest']}/{i:06d}"]
            assert (len(piece), xxhash.xxh3_64_hexdigest(piece)) == (size, check)
            whole += piece
        assert (len(whole), xxhash.xxh3_128_hexdigest(whole)) == (blob["bytes"], blob["digest"])
        return whole

    def decode(self, codec: str, payload: bytes, count: int) -> np.ndarray:  # section 8
        if codec == "fp32":
            assert len(payload) == 4 * count
            return np.frombuffer(payload, "<f4")
        assert codec == "bf16"
        assert len(payload) == 2 * count
        return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32)

    def through(self, codec: str, values: np.ndarray) -> np.ndarray:
        """What the values are after a codec."""
        if codec == "fp32":
            return values
        bits = values.view(np.uint32).astype(np.uint64)
        return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32)

    def layout(self, fragment: int) -> tuple[str, int]:  # section 4.1
        layout = self.agreement["layouts"][fragment]
        text = json.dumps(layout, sort_keys=True, separators=(",", ":"))
        elements = sum(math.prod(shape) for _, shape, _ in layout["tensors"])
        return hashlib.sha256(text.encode()).hexdigest(), elements

    def spans(self, fragment: int) -> list[tuple[int, int]]:  # section 5
        elements, chunk = self.layout(fragment)[1], self.agreement["chunk"]
        assert chunk % 1024 == 0
        return [(start, min(elements, start + chunk)) for start in range(0, elements, chunk)]

    def update(self, commit: dict[str, Any], named: dict[str, Any]) -> list[np.ndarray | None]:  # 5.1 and 5.2
        where = f"rounds/{commit['round']:010d}/"
        offer, inline = self.frame(f"{where}offer/{named['rank']:05d}.{named['slot']:03d}", "offer")
        layout, _ = self.layout(commit["fragment"])
        for name in ("rank", "incarnation", "attempt", "weight", "norm"):
            assert offer[name] == named[name]
        assert (offer["run"], offer["round"], offer["layout"]) == (commit["run"], commit["round"], layout)
        assert offer["codec"] == self.agreement["codec"]
        text = "".join(f"{part}\n" for part in (offer["layout"], offer["codec"], *offer["chunks"]))
        assert xxhash.xxh3_128_hexdigest(text.encode()) == named["digest"]
        spans = self.spans(commit["fragment"])
        assert len(offer["chunks"]) == len(spans)
        chunks, taken = [], 0
        for i, ((start, stop), check) in enumerate(zip(spans, offer["chunks"], strict=True)):
            if offer["inline"]:
                size = (stop - start) * {"fp32": 4, "bf16": 2}[offer["codec"]]
                payload, taken = inline[taken : taken + size], taken + size
            elif (expected := offer["expected"]) and expected[i % len(expected)] == named["rank"]:
                chunks.append(None)  # held back: section 5.1
                continue
            else:
                key = f"{where}update/{named['rank']:05d}.{named['incarnation']:05d}/{i:06d}"
                head, payload = self.frame(key, "update")
                wanted = {name: offer[name] for name in ("run", "round", "fragment", "rank", "incarnation", "attempt")}
                wanted |= {"layout": layout, "codec": offer["codec"], "chunk": i, "start": start, "count": stop - start}
                wanted |= {"weight": offer["weight"]}
                assert {name: head[name] for name in wanted} == wanted
            assert xxhash.xxh3_64_hexdigest(payload) == check
            chunks.append(self.decode(offer["codec"], payload, stop - start))
        return chunks

    def mean(self, parts: list[np.ndarray], weights: list[float]) -> np.ndarray:  # section 5.3
        if len(set(weights)) == 1:
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return total / np.float32(len(parts)) if len(parts) > 1 else total
        whole = 0.0
        for weight in weights:
            whole += weight
        total = parts[0] * np.float32(weights[0] / whole)
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            total = total + part * np.float32(weight / whole)
        return total

    def rounds(self) -> list[tuple[dict[str, Any], np.ndarray]]:
        """Every commit with the mean it stands for."""
        found, previous = [], self.agreement_digest
        names = sorted(k.removeprefix(self.prefix) for k in self.objects if k.startswith(self.prefix + "commits/"))
        for number, name in enumerate(names):
            commit, digest = self.record(name, "commit")
            assert commit["round"] == number
            assert commit["previous"] == previous
            ranks = [named["rank"] for named in commit["contributions"]]
            assert ranks == sorted(set(ranks))
            updates = [self.update(commit, named) for named in commit["contributions"]]
            weights = [named["weight"] for named in commit["contributions"]]
            text = "".join(f"{c['rank']} {c['incarnation']} {c['weight'].hex()}\n" for c in commit["contributions"])
            party = xxhash.xxh3_128_hexdigest(text.encode())[:16]
            means = []
            for i, (start, stop) in enumerate(self.spans(commit["fragment"])):
                parts = [u[i] for u in updates]
                if commit["mode"] == "scatter":
                    head, payload = self.frame(f"rounds/{number:010d}/mean/{party}/{i:06d}", "mean")
                    assert (head["party"], head["chunk"], head["start"], head["count"]) == (
                        party,
                        i,
                        start,
                        stop - start,
                    )
                    assert len(head["parts"]) == len(ranks)
                    assert None not in head["parts"]
                    means.append(self.decode(head["codec"], payload, stop - start))
                    if all(part is not None for part in parts):
                        ours = self.through(self.agreement["mean_codec"], self.mean(parts, weights))
                        assert means[-1].tobytes() == ours.tobytes()
                        self.recomputed += 1
                else:
                    means.append(self.mean(parts, weights))
            found.append((commit, np.concatenate(means)))
            previous = digest
        return found

    def state(self) -> np.ndarray:
        """The initial tensors as one float32 vector; every tensor of this test is float32."""
        assert {dtype for layout in self.agreement["layouts"] for _, _, dtype in layout["tensors"]} == {"float32"}
        return np.frombuffer(self.blob(self.agreement["initial"]), "<f4").copy()


def fused(a: np.ndarray, b: np.float32, c: np.ndarray) -> np.ndarray:
    """One rounding, by exact arithmetic in long double where the machine has it; float64 is enough to tell a step."""
    return (a.astype(np.longdouble) * np.longdouble(b) + c.astype(np.longdouble)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("is_inline", [False, True])
def test_the_page_is_enough_to_read_a_run(count: int, is_inline: bool) -> None:
    from dataclasses import replace

    from rounds_training import QUICK, train

    from atoll.stores.memory import MemoryStore

    store = MemoryStore()
    tuning = replace(QUICK, inline_bytes=1 << 20) if is_inline else QUICK
    finals = train(store, count, 3, tuning=tuning)
    page = Page({key: bytes(store.get(key)) for key in store.list("")}, "run")
    outer = page.agreement["settings"]["outer"]
    lr, momentum = np.float32(outer["lr"]), np.float32(outer["momentum"])
    values = page.state()
    buffer = np.zeros_like(values)
    for commit, mean in page.rounds():
        assert commit["base"] == xxhash.xxh3_128_hexdigest(values.tobytes() + buffer.tobytes())
        assert commit["mode"] == ("scatter" if count > 2 else "whole")
        buffer = momentum * buffer + mean if commit["round"] else mean.copy()
        values = fused(fused(buffer, momentum, mean), -lr, values)
    assert {values.tobytes()} == set(finals)
    assert (page.recomputed > 0) == (count > 2)


def test_every_key_of_a_run_is_on_the_page() -> None:
    from rounds_training import train

    from atoll.stores.memory import MemoryStore

    store = MemoryStore()
    train(store, 3, 5, snapshot_every=2)
    rows = re.findall(r"^\| `P (\S+)`", PAGE.read_text(), flags=re.M)
    patterns = []
    for row in rows:
        text = (
            re.escape(row).replace(re.escape("{digest}"), "[0-9a-f]{32}").replace(re.escape("{party}"), "[0-9a-f]{16}")
        )
        patterns.append(re.sub(r"\\{\w+:(\d+)\\}", r"\\d{\1,}", text))
    for key in store.list(""):
        name = key.removeprefix("runs/run/sync/")
        assert any(re.fullmatch(pattern, name) for pattern in patterns), key
    kinds = {row.split("/")[0] for row in rows}
    assert {"claims", "rounds", "commits", "snapshots", "blobs", "acks", "events"} <= kinds


def test_the_page_names_every_codec_and_every_dtype() -> None:
    from atoll.rounds.codecs.base import codec_names
    from atoll.rounds.layout import ITEM_BYTES

    text = PAGE.read_text()
    assert all(f"`{name}`" in text for name in codec_names())
    assert " ".join(ITEM_BYTES) in text


def test_the_page_names_every_event() -> None:
    import ast

    source = ROOT / "src" / "atoll" / "rounds"
    named = set()
    for file in source.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("add", "_tell")
            ):
                first = node.args[0] if node.args else None
                if isinstance(first, ast.Constant) and isinstance(first.value, str):
                    named.add(first.value)
    assert "round_committed" in named
    assert all(f"`{event}`" in PAGE.read_text() for event in named)
