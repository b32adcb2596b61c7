"""What happens to memory that another stream still uses: exploration and a sanitizer."""
