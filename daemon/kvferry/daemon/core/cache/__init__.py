"""Who is in which host block, who has to go: the cache of one namespace, and its policies."""
