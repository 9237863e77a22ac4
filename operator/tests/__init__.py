# A package, unlike the other test directories: without this file pytest would import operator.tests from a package
# "operator", which would replace the module operator of the standard library.
