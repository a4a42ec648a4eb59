"""Fit of the LSTM, run by `trefoil forecast train` in an environment with torch: windows.npz out.onnx preset seed.

Formulation: LSTM(25) and Dense(1), Adam, mean squared error. Counts enter over the window's largest second, which is
    part of the graph, so that one model knows quiet and busy families; an error counts over the larger of that and the
    truth, so that a spike after silence is one error among others.
    paper: the 600 seconds, tanh. artifact: ten maxima of minutes, relu, L1 of 1e-5 on the input's weights.
Deviations: no source says how counts are scaled (the artifact gives them raw); epochs and batch of `paper` are ours.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

UNITS = 25
EPOCHS = {"paper": 4, "artifact": 30}
BATCH = 64
RATE = {"paper": 3e-3, "artifact": 1e-3}
L1 = 1e-5
MINUTES = 10


class ReluLstm(nn.Module):  # type: ignore[misc]
    """LSTM with relu in place of tanh, as Keras' `activation="relu"`."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(1, 4 * UNITS), nn.Linear(UNITS, 4 * UNITS, bias=False)
        nn.init.xavier_uniform_(self.given.weight)
        nn.init.orthogonal_(self.kept.weight)
        nn.init.zeros_(self.given.bias)
        with torch.no_grad():
            self.given.bias[UNITS : 2 * UNITS] = 1.0  # forget gate

    def forward(self, x: Tensor) -> Tensor:
        """Last state of a window."""
        state = cell = torch.zeros(x.shape[0], UNITS)
        for i in range(MINUTES):
            enters, forgets, new, leaves = (self.given(x[:, i]) + self.kept(state)).chunk(4, dim=1)
            cell = torch.sigmoid(forgets) * cell + torch.sigmoid(enters) * torch.relu(new)
            state = torch.sigmoid(leaves) * torch.relu(cell)
        return state


class Forecast(nn.Module):  # type: ignore[misc]
    """The largest second of the next minute [1/s], from the arrivals of the last 600 seconds."""

    def __init__(self, preset: str) -> None:
        super().__init__()
        self.minutes = preset == "artifact"
        self.lstm = ReluLstm() if self.minutes else nn.LSTM(1, UNITS, batch_first=True)
        self.dense = nn.Linear(UNITS, 1)

    def forward(self, arrivals: Tensor) -> Tensor:
        """Forecast of a batch of windows."""
        largest = arrivals.amax(1, keepdim=True).clamp(min=1.0)
        x = arrivals.reshape(-1, MINUTES, 60).amax(2) if self.minutes else arrivals
        x = (x / largest).unsqueeze(-1)
        state = self.lstm(x) if self.minutes else self.lstm(x)[0][:, -1]
        return (self.dense(state) * largest)[:, 0]


def main() -> None:
    """Fit, export, and print what came of it as one line of JSON."""
    windows, out, preset, seed = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # two would wait for each other at each of 600 steps
    found = np.load(windows)
    x, y, validates = torch.from_numpy(found["x"]), torch.from_numpy(found["y"]), torch.from_numpy(found["validates"])
    scale = torch.maximum(x.amax(1), y).clamp(min=1.0)
    model = Forecast(preset)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE[preset])
    slowing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS[preset])
    (fits,) = torch.where(~validates)
    for epoch in range(EPOCHS[preset]):
        losses = []
        for rows in fits[torch.randperm(len(fits))].split(BATCH):
            loss = (((model(x[rows]) - y[rows]) / scale[rows]) ** 2).mean()
            losses.append(loss.item())
            if isinstance(model.lstm, ReluLstm):
                loss = loss + L1 * model.lstm.given.weight.abs().sum()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        slowing.step()
        print(f"epoch {epoch + 1}: {np.mean(losses):.5f}", file=sys.stderr, flush=True)
    model.eval()
    with torch.no_grad():
        expected = torch.cat([model(rows) for rows in x[validates].split(512)])
    actual = y[validates]
    torch.onnx.export(
        model, (x[:1],), str(out), input_names=["arrivals"], output_names=["max_per_s"], dynamo=False, verbose=False
    )
    error = {
        "windows": len(actual),
        "mae_ratio": round(float((expected - actual).abs().mean() / actual.mean()), 4),
        "under_share": round(float((expected < actual).double().mean()), 4),
    }
    cpu_s = round(time.process_time(), 1)  # on one core, so that a busy machine changes nothing
    print(json.dumps({"validation": error, "torch": torch.__version__, "epochs": EPOCHS[preset], "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
