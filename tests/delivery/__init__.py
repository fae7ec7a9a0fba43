"""Tests of what is shipped: ``make image-test`` builds the image and runs it; ``make test`` leaves them out."""
