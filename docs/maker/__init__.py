"""What the documentation is made with: pages, tables and pictures from the library itself."""
