"""Recipes from runs of verl, TRL, ms-swift and AReaL: `dapo convert`."""
