"""Control core: a step yields what shall happen, one effect at a time, and gets its outcome back.

controller/loop/control_loop.py carries effects out live, trefoil/simulator/simulation.py in simulated time.
"""
