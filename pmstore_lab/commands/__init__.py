"""Commands of `pmstore` that come from here. Importing a module registers them."""
