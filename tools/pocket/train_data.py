"""Rows for training and held-out evaluation, from the token streams that tokenize_corpus.py writes."""
import json
import os

import numpy as np
import torch

import mixture

ROW = 1025  # 1024 inputs and their targets
ROLE_WEIGHTS = (0.2, 1.0, 1.0, 1.0)  # loss weight by the target's role: prompt, reasoning, answer, raw text


class TrainRows:
    """Deterministic batches: batch k of a schedule is always the same rows."""

    def __init__(self, folder, n_batches, batch, device, seed=0):
        with open(os.path.join(folder, "meta.json")) as handle:
            meta = json.load(handle)
        self.starts = torch.from_numpy(mixture.schedule(meta, n_batches * batch, ROW, seed)).to(device)
        load = lambda name: torch.from_numpy(np.load(os.path.join(folder, name)).astype(np.int32)).to(device)  # noqa: E731
        self.tokens, self.roles = load("train.npy"), load("roles.npy").to(torch.uint8)
        self.batch, self.span = batch, torch.arange(ROW, device=device)
        self.weights = torch.tensor(ROLE_WEIGHTS, device=device)

    def get(self, k):
        """(inputs int64 [batch,1024], targets, loss weights float32)."""
        at = self.starts[k * self.batch:(k + 1) * self.batch, None] + self.span
        rows = self.tokens[at].long()
        rows[:, 0] = 0
        return rows[:, :-1], rows[:, 1:], self.weights[self.roles[at[:, 1:]].long()]


class DevRows:
    """The first `per_domain` rows of every held-out stream, as batches of one fixed shape."""

    def __init__(self, folder, batch, device, per_domain=16):
        names = sorted(f[4:-4] for f in os.listdir(folder)
                       if f.startswith("dev_") and f.endswith(".npy") and "_roles" not in f)
        rows, roles, owner = [], [], []
        for number, name in enumerate(names):
            ids = np.load(os.path.join(folder, f"dev_{name}.npy")).astype(np.int64)
            kind = np.load(os.path.join(folder, f"dev_{name}_roles.npy"))
            for i in range(min(per_domain, len(ids) // (ROW - 1) - 1)):
                part = ids[i * (ROW - 1):i * (ROW - 1) + ROW].copy()
                part[0] = 0
                rows.append(part)
                roles.append(kind[i * (ROW - 1):i * (ROW - 1) + ROW])
                owner.append(number)
        self.names, self.count, self.batch = names, len(rows), batch
        pad = -len(rows) % batch
        self.rows = torch.from_numpy(np.stack(rows + rows[:1] * pad)).to(device)
        self.roles = torch.from_numpy(np.stack(roles + roles[:1] * pad)).to(device)
        self.owner = np.array(owner + [-1] * pad)

    def evaluate(self, loss_of):
        """loss_of(inputs, targets) -> float tensor [batch,1024]; returns {domain: nats per token}.

        `dialogue` counts every token, `dialogue_answer` reasoning and answer tokens only.
        """
        parts = [loss_of(self.rows[i:i + self.batch, :-1], self.rows[i:i + self.batch, 1:]).double().cpu()
                 for i in range(0, len(self.rows), self.batch)]
        losses, out = torch.cat(parts), {}
        for number, name in enumerate(self.names):
            mine = torch.from_numpy(self.owner == number)
            out[name] = losses[mine].mean().item()
            if name == "dialogue":
                role = self.roles[mine.to(self.roles.device)][:, 1:].cpu()
                said = (role == 1) | (role == 2)
                out["dialogue_answer"] = losses[mine][said].mean().item()
        return out
