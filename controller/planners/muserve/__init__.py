"""mu-Serve's offline half: clusters of operators, stages, AlpaServe's placement, and which GPU gets which stage."""
