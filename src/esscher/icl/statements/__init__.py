"""Every numbered statement of [S] as data: printed, mended, what we find, and the verdict."""
