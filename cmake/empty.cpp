// Keeps a module that has no sources yet (headers only) a linkable library.
