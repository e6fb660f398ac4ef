import { readFileSync } from 'node:fs';

/** A file of vectors of the repository. */
export const vectors = (path) => JSON.parse(readFileSync(new URL(`../../../crates/${path}`, import.meta.url), 'utf8'));
