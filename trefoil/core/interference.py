"""Interference: how much longer a batch takes next to others on the same slice.

Source: iGniter (TPDS 2023; github.com/icloud-ecnu/igniter): t_act (1 + k sum of the neighbours' L2 use). Its public
    profile of a V100 (i-Gniter/Algorithm/config) has pairs of one model, each on one half of a GPU. In them AlexNet,
    ResNet-50, VGG-19 and SSD take 3.8, 3.7, 3.8 and 4.2 % longer than alone. These are activetime_2 x frequency_2 /
    1530 MHz over activetime_1.
Data: the activity of each batch: the part of a slice that it keeps busy alone, which is its power density, at most 1.
Formulation: s = max(1, sum of all activities) (1 + INTERFERENCE x sum of the others'). Batches that fit together lose
    by the second factor only; others share the slice in proportion. So no batch is faster than alone, and a slice never
    does more than its own work in a second. A batch's joules stay those of its profile: it takes longer.
Deviations: iGniter's batches have fixed parts of a GPU (MPS), which never add up to more than all of it.
"""

from typing import Final

INTERFERENCE: Final = 0.077  # of the time alone, for each whole slice that neighbours keep busy


def stretch(activity: float, others: float, interference: float = INTERFERENCE) -> float:
    """Time of a batch over its time alone, while the activities of its neighbours add up to `others`."""
    return max(1.0, activity + others) * (1.0 + interference * others) if others > 0 else 1.0
