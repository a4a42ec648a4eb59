"""Watch: driver, XIDs, slices and capabilities that change or fail."""
