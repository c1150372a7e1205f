"""Moving a run here from another library: `dapo convert`."""
