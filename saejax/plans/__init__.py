"""Forecasts of an experiment before it runs: bytes, seconds, disk and money, on machines that are not there."""
