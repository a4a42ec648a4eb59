"""Lengths as ordered classes, and the losses of mu-Serve 3.3; for arrays of numpy and tensors of torch alike."""

import numpy as np

PERCENTILES = (25, 50, 75, 99)


def borders_of(lengths):
    """Where classes begin, beyond the first: at these percentiles of the lengths that are trained on."""
    return np.percentile(lengths, PERCENTILES)


def classes_of(lengths, borders):
    """Class 0 to 4 of each length: [0, p25), [p25, p50), [p50, p75), [p75, p99), [p99, ...)."""
    return np.searchsorted(borders, lengths, side="right")


def rounded(scores):
    """Class that real-valued predictions stand for: the nearest."""
    return np.clip(np.rint(scores), 0, len(PERCENTILES)).astype(int)


def squared(out, wanted):
    """Mean squared error: of classes' numbers it is the ordinal loss that mu-Serve chose, of lengths a regression."""
    return ((out - wanted) ** 2).mean()


def absolute(out, wanted):
    """Mean absolute error, of classes' numbers or of lengths."""
    return abs(out - wanted).mean()
