"""Engram constants and hash ids: primes, offsets, multipliers, table rows.

Source: model.md sections 7.2 and 7.3; the compressed token map is built by engram_map.py.  Integer
arithmetic on numpy and torch only.
"""
import numpy as np
import torch


def _is_prime(n):
    if n < 2:
        return False
    d = 2
    while d * d <= n:
        if n % d == 0:
            return False
        d += 1
    return True


def primes(layer_ids, max_ngram, n_heads, vocab):
    """[layers][(n-2)*heads + head] int64: one ascending search per (layer, n) that never reuses a prime."""
    used, table = set(), []
    for _ in layer_ids:
        row = []
        for _ in range(2, max_ngram + 1):
            candidate = vocab - 1
            for _ in range(n_heads):
                candidate += 1
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                row.append(candidate)
        table.append(row)
    return np.array(table, np.int64)


def offsets(prime_table):
    """First table row of each column, per layer."""
    return np.cumsum(prime_table, 1) - prime_table


def multipliers(layer_ids, max_ngram, n_classes):
    """[layers][max_ngram] odd int64, index = look-back distance."""
    bound = (2 ** 63 - 1) // n_classes // 2
    return np.stack([2 * np.random.default_rng(10007 * layer).integers(0, bound, max_ngram, np.int64) + 1
                     for layer in layer_ids])


class Hasher:
    """Table rows of every Engram layer for batches of token ids."""

    def __init__(self, cfg, token_classes, device="cpu"):
        self.primes = primes(cfg.engram_layer_ids, cfg.engram_max_ngram_size, cfg.engram_n_heads,
                             cfg.engram_vocab_size)
        self.offsets = offsets(self.primes)
        self.multipliers = multipliers(cfg.engram_layer_ids, cfg.engram_max_ngram_size,
                                       cfg.engram_compressed_vocab_size)
        for layer, rows in zip(self.primes, cfg.engram_num_embeddings):
            if layer.sum() != rows:
                raise ValueError(f"engram_num_embeddings {rows} differs from the sum of the primes {layer.sum()}")
        self.max_ngram, self.n_heads = cfg.engram_max_ngram_size, cfg.engram_n_heads
        self.classes = torch.from_numpy(np.array(token_classes, np.int64)).to(device)
        self.pad = int(self.classes[cfg.engram_pad_token_id])

    def rows(self, tokens):
        """tokens int64 [B, S] from position 0 -> list per Engram layer of int64 [B, S, columns]."""
        ids = self.classes[tokens]
        back = [ids]
        for shift in range(1, self.max_ngram):
            moved = torch.full_like(ids, self.pad)
            moved[:, shift:] = ids[:, :-shift] if shift < ids.shape[1] else ids[:, :0]
            back.append(moved)
        out = []
        for layer in range(len(self.primes)):
            columns, mixed = [], back[0] * int(self.multipliers[layer][0])
            for n in range(2, self.max_ngram + 1):
                mixed = mixed ^ (back[n - 1] * int(self.multipliers[layer][n - 1]))
                for head in range(self.n_heads):
                    c = (n - 2) * self.n_heads + head
                    columns.append(mixed % int(self.primes[layer][c]) + int(self.offsets[layer][c]))
            out.append(torch.stack(columns, -1))
        return out
