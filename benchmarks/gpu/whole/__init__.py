"""Whole models of every family."""
