"""The controller's loops as pure cores: they yield what shall happen, one effect at a time, and get its outcome back.

controller/loop.py and controller/act.py carry effects out live, trefoil/simulator/simulation.py in simulated time.
"""
