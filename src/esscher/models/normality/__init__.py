"""Normality of the error and coverage of confidence regions, on laws and on heads of a model, as a
run.
"""
