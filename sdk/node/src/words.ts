// Hints for mistyped words.

/** The number of letters that are wrong, missing, added or swapped with their neighbor. */
function distance(one: string, other: string): number {
  let [before, last]: [number[], number[]] = [[], Array.from({ length: other.length + 1 }, (_, at) => at)];
  for (let row = 1; row <= one.length; row += 1) {
    const next = [row];
    for (let column = 1; column <= other.length; column += 1) {
      const isSame = one[row - 1] === other[column - 1];
      let least = Math.min((last[column] ?? 0) + 1, (next[column - 1] ?? 0) + 1, (last[column - 1] ?? 0) + (isSame ? 0 : 1));
      const isSwapped = row > 1 && column > 1 && one[row - 1] === other[column - 2] && one[row - 2] === other[column - 1];
      if (isSwapped) least = Math.min(least, (before[column - 2] ?? 0) + 1);
      next.push(least);
    }
    [before, last] = [last, next];
  }
  return last[other.length] ?? 0;
}

const MAX_WORD = 100;

/** A hint at the word that was probably meant; empty if none is near. */
export function didYouMean(written: string, words: Iterable<string>): string {
  if (written.length > MAX_WORD) return '';
  const fold = (word: string) => word.toLowerCase().replace(/[-_]/g, '');
  let nearest: string | undefined;
  let least = Infinity;
  for (const word of words) {
    const wrong = distance(fold(written), fold(word));
    // At most one wrong letter in three: otherwise it is another word.
    if (wrong >= least || wrong > Math.ceil(Math.max(word.length, written.length) / 3)) continue;
    [nearest, least] = [word, wrong];
  }
  return nearest === undefined ? '' : `; did you mean ${JSON.stringify(nearest)}?`;
}
