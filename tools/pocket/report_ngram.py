"""Unigram and interpolated 5-gram baselines over token ids, with Witten-Bell weights.

p_n(w|h) = (c(h,w) + T(h) p_{n-1}(w|h')) / (c(h) + T(h)), T(h) = distinct continuations of h, p_0 = 1/V.
Counts are sorted tables of packed ids (V^5 < 2^63 for V <= 6208), so all of it is sorting and searching.
"""
import torch


class NGram:
    def __init__(self, tokens, vocab, order=5):
        """tokens int64 [N]: the training stream, documents joined (n-grams across a BOS are kept)."""
        if vocab ** order >= 2 ** 63:
            raise ValueError(f"report_ngram: {vocab}^{order} does not fit 63 bits")
        self.vocab, self.order, self.tables = vocab, order, []
        packed = torch.zeros_like(tokens)
        for n in range(1, order + 1):
            head = packed[:-1] if n > 1 else packed
            packed = head * vocab + tokens[n - 1:]
            grams, counts = torch.unique(packed, return_counts=True)
            contexts, back = torch.unique_consecutive(grams // vocab, return_inverse=True)
            totals = torch.zeros(len(contexts), dtype=torch.int64, device=tokens.device).scatter_add_(0, back, counts)
            kinds = torch.bincount(back, minlength=len(contexts))
            self.tables.append((grams, counts, contexts, totals, kinds))

    @staticmethod
    def _find(keys, values, wanted):
        at = torch.searchsorted(keys, wanted).clamp_max(len(keys) - 1)
        return torch.where(keys[at] == wanted, values[at], 0)

    def nats(self, rows, order):
        """Negative log probability of every target; rows int64 [R,S] -> float64 [R,S-1]."""
        targets = rows[:, 1:]
        p = torch.full(targets.shape, 1.0 / self.vocab, dtype=torch.float64, device=rows.device)
        for n in range(1, order + 1):
            grams, counts, contexts, totals, kinds = self.tables[n - 1]
            context = torch.zeros_like(targets)
            for back in range(n - 1, 0, -1):  # tokens at distance back before the target
                shifted = torch.zeros_like(targets)
                if back == 1:
                    shifted = rows[:, :-1]
                else:
                    shifted[:, back - 1:] = rows[:, :-back]
                context = context * self.vocab + shifted
            known = torch.arange(1, rows.shape[1], device=rows.device) >= n - 1
            c = self._find(grams, counts, context * self.vocab + targets).double()
            total = self._find(contexts, totals, context).double()
            kind = self._find(contexts, kinds, context).double()
            better = (c + kind * p) / (total + kind).clamp_min(1)
            p = torch.where(known & (total > 0), better, p)
        return -torch.log(p)
