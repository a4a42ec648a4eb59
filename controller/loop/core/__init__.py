"""Control core: each step asks its ports (`ports.py`) for what is around it.

controller/loop/live_ports.py implements them live, trefoil/simulator/simulation.py in simulated time.
"""
