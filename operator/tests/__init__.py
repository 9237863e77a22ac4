# A package, unlike the other tests: by its path it would be called operator.tests, and pytest would put this folder in
# the place of the standard library's operator.
