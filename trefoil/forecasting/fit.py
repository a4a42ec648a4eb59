"""Fit of the LSTM, run by `trefoil forecast train` in an environment with torch: windows.npz out.onnx seed.

Source: InfAdapter section 5: the 600 seconds in, LSTM(25) and Dense(1), Adam.
Formulation: the network answers the largest second of the last minute plus what it adds, so that untrained it forecasts
    that maximum. A step of it is a minute: its sixty counts and the largest of them, over the window's largest second.
    That scaling is part of the graph, so that one model knows quiet and busy families.
    Loss: pinball at `QUANTILE`, over the larger of that second and the truth, so that a spike after silence is one
    error among others. Of all epochs the one with the least error on the windows that validate is exported.
Deviations: the paper has the mean squared error. No source says how counts are scaled, nor what a step is: second by
    second the network forgets the minutes and never beats the last one's maximum. Epochs and batch are ours.
"""

import copy
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

UNITS = 25
EPOCHS = 40
BATCH = 128
RATE = 3e-3
QUANTILE = 0.5
MINUTE_S = 60


class Forecast(nn.Module):  # type: ignore[misc]
    """The largest second of the next minute [1/s], from the arrivals of the last 600 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(MINUTE_S + 1, UNITS, batch_first=True)
        self.dense = nn.Linear(UNITS, 1)
        with torch.no_grad():
            self.lstm.bias_ih_l0[UNITS : 2 * UNITS] = 1.0  # forget gate
            self.dense.weight.zero_()
            self.dense.bias.zero_()

    def forward(self, arrivals: Tensor) -> Tensor:
        """Forecast of a batch of windows."""
        largest = arrivals.amax(1, keepdim=True).clamp(min=1.0)
        minutes = (arrivals / largest).reshape(arrivals.shape[0], -1, MINUTE_S)
        state = self.lstm(torch.cat((minutes, minutes.amax(2, keepdim=True)), 2))[0][:, -1]
        return last_minute(arrivals) + (self.dense(state) * largest)[:, 0]


def last_minute(arrivals: Tensor) -> Tensor:
    """Largest second of the last minute of each window."""
    return arrivals[:, -MINUTE_S:].amax(1)


def mae_ratio(expected: Tensor, actual: Tensor) -> float:
    """Mean error over the mean of what came."""
    return round(float((expected - actual).abs().mean() / actual.mean()), 4)


def main() -> None:
    """Fit, export, and print its outcome as one line of JSON."""
    windows, out, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # two would wait for each other at each step
    found = np.load(windows)
    x, y, validates = torch.from_numpy(found["x"]), torch.from_numpy(found["y"]), torch.from_numpy(found["validates"])
    scale = torch.maximum(x.amax(1), y).clamp(min=1.0)
    model, best, best_error = Forecast(), {}, float("inf")
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    slowing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    (fits,) = torch.where(~validates)
    for epoch in range(EPOCHS):
        for rows in fits[torch.randperm(len(fits))].split(BATCH):
            short = (y[rows] - model(x[rows])) / scale[rows]
            loss = torch.maximum(QUANTILE * short, (QUANTILE - 1) * short).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        slowing.step()
        with torch.no_grad():
            expected = torch.cat([model(rows) for rows in x[validates].split(512)])
        error = float(((expected - y[validates]).abs() / scale[validates]).mean())
        print(f"epoch {epoch + 1}: {error:.5f}", file=sys.stderr, flush=True)
        if error < best_error:
            best, best_error = copy.deepcopy(model.state_dict()), error
    model.load_state_dict(best)
    model.eval()
    with torch.no_grad():
        expected = torch.cat([model(rows) for rows in x[validates].split(512)])
    actual = y[validates]
    torch.onnx.export(
        model, (x[:1],), str(out), input_names=["arrivals"], output_names=["max_per_s"], dynamo=False, verbose=False
    )
    validation = {
        "windows": len(actual),
        "mae_ratio": mae_ratio(expected, actual),
        "mae_ratio_of_last_minute": mae_ratio(last_minute(x[validates]), actual),
        "under_share": round(float((expected < actual).double().mean()), 4),
    }
    cpu_s = round(time.process_time(), 1)  # on one core, so that a busy machine changes nothing
    print(json.dumps({"validation": validation, "torch": torch.__version__, "epochs": EPOCHS, "cpu_s": cpu_s}))


if __name__ == "__main__":
    main()
