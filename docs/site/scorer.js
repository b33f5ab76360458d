/* What the search shows first: pages that say what to do, then rules, last how it is made and what
 * changed. The weights of matches are Sphinx's own. */
const FIRST = /^docs\/(howto\/|tutorial|faq|TRAINING|DISTRIBUTED|INTEGRATIONS|notebooks\/)/;
const LAST = /^(benchmarks\/|crashtests\/|CHANGELOG|docs\/(ARCHITECTURE|EXPERIMENTS|CONTRIBUTING|FORMAT|GLOSSARY|CRASH_MODEL|made))/;
var Scorer = {
  score: ([page, title, anchor, text, score]) =>
    score + (FIRST.test(page) ? 10 : LAST.test(page) ? -10 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
