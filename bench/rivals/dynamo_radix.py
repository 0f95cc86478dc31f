"""NVIDIA Dynamo's RadixTree: hashes of blocks in, matches out. Run by bench_index.py in a venv of its own."""

import json
import random
import sys

from dynamo.llm import RadixTree, compute_block_hash_for_seq
from lines import median_us, serve

PAGE = 64
WORKER = 1


def stored(hashes, parent=None):
    """The event that says that blocks follow `parent`; every block has its own hash as its name."""
    blocks = [{"block_hash": each, "tokens_hash": each} for each in hashes]
    return event({"stored": {"parent_hash": parent, "blocks": blocks}})


def event(data):
    """An event as the tree reads it."""
    return json.dumps({"event_id": 0, "dp_rank": 0, "data": data}).encode()


class Dynamo:
    """The same shapes as in bench_index.py: nodes of many pages, then many leaves."""

    def __init__(self, stack):
        del stack
        self.random = random.Random(int(sys.argv[1]))
        self.tree = RadixTree()

    def tokens(self, count):
        """So many random token ids."""
        return [self.random.randrange(128_000) for _ in range(count)]

    def prepare_match(self, tokens, node_pages):
        """Cache a prompt in nodes of so many pages."""
        self.prompt = self.tokens(tokens)
        self.hashes = hashes = compute_block_hash_for_seq(self.prompt, PAGE)
        for at in range(0, len(hashes), node_pages):
            self.tree.apply_event(WORKER, stored(hashes[at : at + node_pages], hashes[at - 1] if at else None))
        if self.find().scores != {(WORKER, 0): len(hashes)}:
            raise ValueError("it did not find the prompt")

    def find(self):
        """The matches of the prompt."""
        return self.tree.find_matches(self.hashes)

    def match(self, calls):
        """Microseconds of the median match, from token ids."""
        return median_us([lambda: self.tree.find_matches(compute_block_hash_for_seq(self.prompt, PAGE))] * calls)

    def match_hashes(self, calls):
        """The same where the hashes are there already."""
        return median_us([self.find] * calls)

    def insert(self, tokens, calls):
        """Microseconds of the median cold insert, hashing and the event's JSON left out."""
        made = [stored(compute_block_hash_for_seq(self.tokens(tokens), PAGE)) for _ in range(calls)]
        empty = [(RadixTree(), each) for each in made]
        return median_us([lambda t=tree, e=each: t.apply_event(WORKER, e) for tree, each in empty])

    def prepare_evict(self, leaves, node_pages):
        """Cache so many leaves of so many pages."""
        self.tree, self.removals = RadixTree(), []
        for _ in range(leaves):
            hashes = [self.random.getrandbits(63) for _ in range(node_pages)]
            self.tree.apply_event(WORKER, stored(hashes))
            self.removals.append(event({"removed": {"block_hashes": hashes}}))
        self.random.shuffle(self.removals)

    def evict(self, calls):
        """Microseconds of the median removal of one leaf; which one goes is its caller's business."""
        chosen = [self.removals.pop() for _ in range(calls)]
        return median_us([lambda e=each: self.tree.apply_event(WORKER, e) for each in chosen])


serve(Dynamo)
