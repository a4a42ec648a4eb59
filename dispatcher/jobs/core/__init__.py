"""Cores of jobs: what a job may be, its journal, and when a batch may take an idle slice."""
