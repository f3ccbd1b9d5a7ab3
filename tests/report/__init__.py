"""Tests of the report; a package, so that its browser ends with it."""
