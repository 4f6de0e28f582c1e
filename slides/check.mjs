// Tells what of each slide is outside of its page, or cut off: node check.mjs PAGES.html
// PAGES.html has all slides on one page (Marp's template "bare"). Prints a line per mistake; the
// exit code is 1 if there is one. A second argument is a folder that gets a picture of each slide.
import {pathToFileURL} from 'node:url';
import puppeteer from 'puppeteer-core';

const browser = await puppeteer.launch({
  executablePath: process.env.CHROME_PATH,
  args: process.env.CHROME_NO_SANDBOX ? ['--no-sandbox'] : [],
});
const page = await browser.newPage();
await page.setViewport({width: 1280, height: 720});
await page.goto(pathToFileURL(process.argv[2]).href);
const mistakes = await page.evaluate(async () => {
  await document.fonts.ready;
  const found = [];
  const sections = [...document.querySelectorAll('section')];
  if (sections.length === 0) found.push('there are no slides');
  const fonts = [...document.fonts].map(font => font.status);  // unloaded: not used
  if (fonts.includes('error') || !fonts.includes('loaded')) found.push('a font was not loaded');
  sections.forEach((section, index) => {
    const page = section.getBoundingClientRect(), edge = 24, bottom = 34;  // the foot: path and number
    const note = (what, rect) => found.push(
        `slide ${index + 1}: ${what} at ${Math.round(rect.left - page.left)}, ` +
        `${Math.round(rect.top - page.top)} to ${Math.round(rect.right - page.left)}, ` +
        `${Math.round(rect.bottom - page.top)}`);
    const check = (what, rect) => {
      if (rect.left < page.left + edge || rect.right > page.right - edge ||
          rect.top < page.top + edge || rect.bottom > page.bottom - bottom) {
        note(`${what} is outside,`, rect);
      }
    };
    const texts = document.createTreeWalker(section, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode.textContent.trim();
      if (!text || texts.currentNode.parentElement.closest('style, script, footer')) continue;
      const range = document.createRange();
      range.selectNodeContents(texts.currentNode);
      const rect = range.getBoundingClientRect();
      check(`"${text.slice(0, 40)}"`, rect);
      const size = parseFloat(getComputedStyle(texts.currentNode.parentElement).fontSize);
      if (size < 16) note(`"${text.slice(0, 40)}" is only ${size} pixels high,`, rect);
    }
    for (const box of section.querySelectorAll('img, svg, pre, table')) {
      const rect = box.getBoundingClientRect();
      check(box.localName, rect);
      if (box.localName === 'img' && (!box.naturalWidth || rect.width < 300)) {
        note('an image is not there, or too small,', rect);
      }
      if (box.localName === 'pre' && (box.scrollWidth > box.clientWidth + 1 ||
                                      box.scrollHeight > box.clientHeight + 1)) {
        note('code is cut off,', rect);
      }
    }
  });
  return found;
});
if (process.argv[3]) {
  const slides = await page.$$('section');
  for (const [index, slide] of slides.entries()) {
    const path = `${process.argv[3]}/${String(index + 1).padStart(2, '0')}.png`;
    await slide.screenshot({path});
  }
}
await browser.close();
for (const mistake of mistakes) console.log(mistake);
process.exitCode = mistakes.length > 0 ? 1 : 0;
