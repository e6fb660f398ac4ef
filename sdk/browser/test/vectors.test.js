// The published meanings of responses, in the module that is shipped.
import assert from 'node:assert/strict';
import { readFileSync } from 'node:fs';
import { test } from 'node:test';
import { judge } from '../dist/index.js';

test('responses have the published meanings', () => {
  const { contexts, statuses, responses } = JSON.parse(readFileSync(new URL('../../../crates/client/vectors/meanings.json', import.meta.url), 'utf8'));
  // A browser always sends a key, and takes other server errors for "again". The library for Node runs all contexts, with the same source.
  const ours = contexts.filter(({ protection, server_errors }) => protection === 'keyed' && server_errors === 'again');
  let count = 0;
  for (const { name, headers, body, meanings } of responses) {
    for (const context of ours) {
      const expected = meanings[context.name].flatMap(([times, meaning]) => Array(times).fill(meaning));
      statuses.forEach((status, at) => {
        assert.equal(judge(context.in_doubt, status, new Headers(headers), new TextEncoder().encode(body)), expected[at], `${name}, ${context.name}, ${status}`);
        count += 1;
      });
    }
  }
  assert.deepEqual([responses.length, ours.map(({ in_doubt }) => in_doubt), statuses.length, count], [168, [false, true], 38, 12_768]);
});
