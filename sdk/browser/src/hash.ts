/** A hash of 32 bits. Nothing is safe because of it: the service compares requests, and 57 names of errors have it in the table of signals. */
export function mark(text: string): string {
  let found = 1;
  for (let at = 0; at < text.length; at += 1) found = Math.imul(found ^ text.charCodeAt(at) ^ (found >>> 15), 0x85ebca6b);
  return (found >>> 0).toString(36);
}
