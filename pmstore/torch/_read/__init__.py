"""Stored runs, read without the program that wrote them."""
