"""The vocabulary that every other package uses: types, errors, the codec, the machine."""
