"""Workloads, timing and the result file. Imports nothing here: `report` reads results on machines without torch."""
