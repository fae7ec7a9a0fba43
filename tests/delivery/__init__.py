"""Tests of what is shipped: ``make image-test`` builds the image and looks into it; ``make test`` leaves them out."""
