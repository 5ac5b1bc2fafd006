"""Other packages' names, a folder a package, whose modules are called as that package's are: to change an import, and no more."""
