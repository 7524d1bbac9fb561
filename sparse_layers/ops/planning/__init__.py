"""WHERE to compute: a mask and two lengths become block lists in the row orders that suit them."""
