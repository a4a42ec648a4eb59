"""Overview of a running system, from what its controller answers: for `trefoil status`, `trefoil top` and the page."""
