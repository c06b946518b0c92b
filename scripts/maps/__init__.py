"""What frameworks' own converters make of tiny models: one module for each framework, which yields cases."""
